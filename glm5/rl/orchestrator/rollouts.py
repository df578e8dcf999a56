"""Asynchronous rollouts with an engine and environments: groups are played as tasks of asyncio, all the time."""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from glm5.common.errors import TrainingError
from glm5.config.rl import RLRecipe
from glm5.rl.build import num_rollouts
from glm5.rl.orchestrator.concurrency import AdaptiveConcurrency
from glm5.rl.orchestrator.dispatcher import Dispatcher, Limits, Service, Start
from glm5.rl.orchestrator.sink import Drops, Sink
from glm5.rl.rollout import Group, Rollout
from glm5.rl.rollouts.collect import AnyHarness, Draw, play_group
from glm5.rl.services import COUNTS, ServiceSettings
from glm5.rl.tasks import TaskSource
from glm5.rl.waits import episode_figures

MOST_DROPPED = 8
"""Batches' worth of groups of one environment that may be dropped in a row."""
LOOK_SECONDS = 1.0
"""After which the settings are looked at again, while a batch is missing."""


class AsyncRollouts:
    """Plays groups until `cancel`, and hands out batches. `step`: the number of steps that are trained. `settings`:
    weights, concurrency and rates, which may change at any moment. Places that were given out keep their environment.

    After `cancel` nothing starts until `play_with` gives it a harness, as when its engine has ended: the tasks that
    were under way are asked again.
    """

    def __init__(self, recipe: RLRecipe, tasks: TaskSource, step: int, settings: ServiceSettings) -> None:
        cfg, rollouts = recipe.asynchronous, recipe.rollouts
        assert cfg is not None
        self.limits = Limits(rollouts.groups, rollouts.group_size, cfg.max_staleness, cfg.push_every)
        services = {one.name: Service(one.name) for one in recipe.environment}
        most = num_rollouts(recipe)
        self.concurrency = AdaptiveConcurrency(most, least=rollouts.group_size, most=most)
        self.dispatcher = Dispatcher(self.limits, tasks.mixture.draw, services, most, step)
        self.sink = Sink(cfg.max_staleness, cfg.stale)
        self.harness: AnyHarness | None = None
        self._tasks, self._seed, self._settings = tasks, recipe.seed, settings
        self._again: dict[str, deque[Draw]] = {name: deque() for name in services}
        self._draws: dict[int, Draw] = {}  # of groups that are under way or in the sink
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._late: dict[int, asyncio.Event] = {}  # of each group that plays; set where it is to end as it is
        self._dropped = dict.fromkeys(services, 0)  # in a row
        self._dropped_groups = Counter[str]()  # by environment
        self._told = Counter[str]()  # of the services' counts, by the figures' names
        self._timer: asyncio.TimerHandle | None = None  # a rate lets a group start
        self._ended: list[Rollout] = []  # that figures are to tell of
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self.adjust()

    async def batch(self, step: int) -> list[Group]:
        """The groups of a step, once they have ended. Raises EngineDead and TrainingError."""
        quota, version = self.dispatcher.quota(step), self.limits.version_at(step)
        assert self.harness is not None
        self.concurrency.observe(await self.harness.policy.engines.usage())
        self.dispatcher.concurrency = self.concurrency.allowed
        while True:
            self.adjust()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._sweep(version)
            if self.sink.has(quota) and not self._give_up(step):
                taken = self.sink.take(quota)
                for ended in taken:
                    self._dropped[ended.start.service] = 0
                    del self._draws[ended.start.number]
                return [group for ended in taken for group in ended.groups]
            self.fill()
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_SECONDS)

    def adjust(self) -> None:
        """What the settings say from now on."""
        self._settings.weigh(self._tasks.mixture, self.dispatcher.first_free)
        for one in self._settings.environments:
            service = self.dispatcher.services[one.name]
            service.concurrency, service.rate = one.concurrency, one.rate

    def fill(self) -> None:
        """Start what may start."""
        if self._error is not None:
            return
        loop = asyncio.get_running_loop()
        while (start := self.dispatcher.next(loop.time())) is not None:
            again = self._again[start.service]
            draw = again.popleft() if again else self._tasks.next_of(start.service, start.number)
            self._draws[start.number] = draw
            self._playing[start.number] = asyncio.create_task(self._play(start, draw))
        if self._timer is not None:
            self._timer.cancel()
        due = None if self.dispatcher.is_draining else self.dispatcher.due(loop.time())
        self._timer = None if due is None else loop.call_at(due, self.fill)

    def pushed(self, version: int) -> None:
        """The engine has weights of `version`."""
        self.dispatcher.pushed(version)
        self.fill()

    def play_with(self, harness: AnyHarness) -> None:
        """Play with this harness from now on."""
        self.harness, self.dispatcher.is_draining = harness, False

    async def cancel(self) -> None:
        """Cancel what is under way; the same tasks are asked again first."""
        self.dispatcher.is_draining = True
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        for task in playing:
            with suppress(asyncio.CancelledError):
                await task
        for number in list(self._playing):  # tasks that were cancelled before they began
            del self._playing[number]
            self._cancelled(number)
        self._error = None

    def figures(self) -> dict[str, float]:
        """Of the present moment, what was dropped since they were last asked for, and each batch's worth of episodes
        that ended."""
        drops, self.sink.drops = self.sink.drops, Drops()
        ended = list[Rollout]()
        if len(self._ended) >= self.limits.groups * self.limits.group_size:  # fewer would be the short ones
            ended, self._ended = self._ended, []
        found = {
            "dispatcher/in_flight": self.dispatcher.in_flight,
            "dispatcher/allowed": self.dispatcher.concurrency,
            "dispatcher/held": len(self.sink.held),
            "staleness/dropped": drops.rollouts,
            "staleness/dropped_groups": drops.groups,
            "staleness/checked": (self.limits.groups + drops.groups) * self.limits.group_size,
        }
        found |= {f"staleness/dropped_below_{length}_tokens": count for length, count in sorted(drops.lengths.items())}
        for one in self.dispatcher.services.values():
            counts = (one.started, one.ended, one.cancelled, self._dropped_groups[one.name])
            told = {f"service/{key}/{one.name}": count for key, count in zip(COUNTS, counts, strict=True)}
            found |= {name: count - self._told[name] for name, count in told.items()}
            found[f"service/in_flight/{one.name}"] = one.in_flight
            self._told.update({name: found[name] for name in told})
        return {name: float(value) for name, value in found.items()} | episode_figures(ended)

    def state(self) -> dict[str, Any]:
        """What a run that goes on needs: the next group's number, and tasks that were asked and not trained."""
        pending = [*self._draws.values(), *(draw for draws in self._again.values() for draw in draws)]
        return {"next_number": self.dispatcher.next_number, "pending": [astuple(draw) for draw in pending]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.dispatcher.next_number = state["next_number"]
        for draw in (Draw(*one) for one in state["pending"]):
            self._again[draw.environment].append(draw)

    async def _play(self, start: Start, draw: Draw) -> None:
        assert self.harness is not None
        late = self._late[start.number] = asyncio.Event()
        try:
            groups = await play_group(
                self.harness,
                draw,
                self.limits.group_size,
                self._seed,
                on_episode=lambda episode: self._episode_ended(start.number, episode),
                late=late,
            )
        except BaseException as error:
            self._cancelled(start.number)
            if not isinstance(error, Exception):
                raise
            self._error = self._error or error
        else:
            self._ended += [one for group in groups for one in group.rollouts]
            self.sink.add(self.dispatcher.end(start.number), groups)
        finally:
            self._playing.pop(start.number, None)
            self._late.pop(start.number, None)
            self._changed.set()
        self.fill()

    def _give_up(self, step: int) -> bool:
        """Episodes that would make their groups stale are not waited for; returns whether there are such."""
        overdue = self.dispatcher.overdue(step) if self.sink.stale == "drop" else []
        for number in overdue:
            self._late[number].set()
        return bool(overdue)

    def _cancelled(self, number: int) -> None:
        start = self.dispatcher.cancel(number)
        self._again[start.service].appendleft(self._draws.pop(number))

    def _episode_ended(self, number: int, episode: int) -> None:
        self.dispatcher.episode_ended(number, episode)
        self.concurrency.episode_ended()
        self.fill()

    def _sweep(self, version: int) -> None:
        for ended in self.sink.sweep(version):
            service = ended.start.service
            self.dispatcher.reopen(ended.start)
            del self._draws[ended.start.number]
            self._dropped[service] += 1
            self._dropped_groups[service] += 1
            if self._dropped[service] > MOST_DROPPED * self.limits.groups:
                reasons = [one.failure_reason for group in ended.groups for one in group.rollouts if one.failure]
                raise TrainingError(
                    f"environment {service}: {self._dropped[service]} groups in a row could not be trained; the last "
                    f"one: {reasons[0] if reasons else 'no token was sampled'}. Where they are stale, raise "
                    "asynchronous.max_staleness or asynchronous.push_every, or lower rollouts.concurrency"
                )
