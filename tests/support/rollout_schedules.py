"""Random schedules of asynchronous rollouts on a clock that is only counted: episodes that take long, fail or are
cancelled, pushes that take time, engines that die, environments whose weight, concurrency and rate change, an end at
any moment.

The dispatcher and the sink are the real ones. What happened is checked from outside, by a ledger of its own.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random
from types import ModuleType
from typing import Any

from glm5.common.errors import ConfigError, TrainingError
from glm5.rl.environments import mixture
from glm5.rl.environments.protocol import EXCLUDED, Task
from glm5.rl.orchestrator import dispatcher, sink
from glm5.rl.orchestrator.dispatcher import Start
from glm5.rl.orchestrator.sink import Ended
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import Segment
from glm5.rl.training.repair import repair

RATES = [None, None, 60.0, 600.0]


@dataclass
class Plan:
    """A schedule, drawn from a seed."""

    seed: int
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        draw = self.random = Random(self.seed)
        # groups, group_size, max_staleness, push_every
        self.limits = (draw.randint(1, 6), draw.choice([1, 2, 4, 5]), draw.choice([0, 0, 1, 2, 4]), draw.randint(1, 3))
        self.weights = {f"e{number}": draw.choice([1.0, 2.0, 3.0, 7.0]) for number in range(draw.randint(1, 4))}
        self.first_step = draw.choice([0, 0, 5])  # 5: a run that goes on
        self.steps = self.first_step + draw.randint(3, 12)
        self.stale = draw.choice(["drop", "withhold"])
        self.concurrency = draw.choice([1, 8, 30, 1000])
        self.long = draw.choice([0.0, 0.1, 0.5])  # share of episodes that take many times as long
        self.failing = draw.choice([0.0, 0.1, 0.4])
        self.dying = draw.choice([0.0, 0.0, 0.05])  # chance, at each step, that the engine dies
        size = self.limits[1]
        # Episodes at a time, and episodes a minute.
        self.bounds = {name: (draw.choice([None, None, 1, 3 * size]), draw.choice(RATES)) for name in self.weights}
        self.changes = [draw.uniform(0, 30) for _ in range(draw.choice([0, 3, 12]))]
        self.stops_at = draw.choice([None, None, draw.uniform(0, 30)])


@dataclass
class _Episode:
    start: Start
    number: int
    oldest: int | None = None
    failure: Any = None


class Simulation:
    """Runs a plan to its end. AssertionError where a rule is broken."""

    def __init__(
        self,
        plan: Plan,
        dispatching: ModuleType = dispatcher,
        sinking: ModuleType = sink,
        mixing: ModuleType = mixture,
    ) -> None:
        self.plan, self.random, self.limits = plan, plan.random, dispatching.Limits(*plan.limits)
        self.mixture = mixing.Mixture(plan.weights)
        self.services = {name: dispatching.Service(name, *plan.bounds[name]) for name in plan.weights}
        self.dispatcher = dispatching.Dispatcher(
            self.limits, self.mixture.draw, self.services, plan.concurrency, plan.first_step
        )
        self.sink = sinking.Sink(self.limits.max_staleness, plan.stale)
        self.now, self._order = 0.0, 0
        self.step, self.is_training = plan.first_step, False
        self.version = self._version_at(plan.first_step)
        assert self.dispatcher.version == self.version
        self._events: list[tuple[float, int, str, Any]] = []
        self._playing: dict[int, dict[int, _Episode]] = {}
        self._ended: dict[int, list[Rollout | None]] = {}
        # The ledger: what became of every episode that was started, by group and number.
        self.outcome: dict[tuple[int, int], str] = {}
        self.trained: Counter[str] = Counter()
        self.started: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self.num_permits = 0
        self.stale, self.excluded, self.given_up = set[int](), set[int](), set[int]()  # rollouts by id
        self.kept_alive: list[Rollout] = []
        self.open = set(range(plan.first_step * self.limits.groups, self._num_admitted()))  # places that none covers
        self.turns = [self.mixture.draw(place) for place in range(self._num_admitted())]  # whose they were when opened
        self.weights = [(0, plan.weights)]
        self.starts = dict.fromkeys(plan.weights, -1000000000.0)  # when the last group of each started
        self._next_fill: float | None = None
        self._num_needed = 0  # events other than changes, without which nothing may wait

    def _version_at(self, step: int) -> int:
        """Pushes before a step, written down once more."""
        return sum(1 for done in range(1, step + 1) if done % self.limits.push_every == 0)

    def _num_admitted(self) -> int:
        """Groups of all steps that start with weights at most `max_staleness` newer than the engine's."""
        step = self.plan.first_step
        while self._version_at(step) <= self.version + self.limits.max_staleness:
            step += 1
        return step * self.limits.groups

    def run(self) -> None:
        for seconds in self.plan.changes:
            self._later(seconds, "changed")
        self._fill()
        num_events = 0
        while self.step < self.plan.steps:
            if self.plan.stops_at is not None and self.now > self.plan.stops_at:
                break
            if not self.is_training:
                self._try_batch()
            assert self._num_needed, f"nothing goes on at step {self.step} of {self.plan.steps}: deadlock"
            self.now, _, kind, what = heappop(self._events)
            self._num_needed -= kind != "changed"
            getattr(self, f"_{kind}")(what)
            self._check()
            num_events += 1
            assert num_events < 200_000, "no end"
        self._drain()

    def _later(self, seconds: float, kind: str, what: Any = None) -> None:
        self._at(self.now + seconds, kind, what)

    def _at(self, time: float, kind: str, what: Any = None) -> None:
        self._order += 1
        self._num_needed += kind != "changed"
        heappush(self._events, (time, self._order, kind, what))

    def _fill(self) -> None:
        while (start := self.dispatcher.next(self.now)) is not None:
            assert start.version == self.version
            assert start.number not in self._playing
            assert start.place == self._first_open()
            assert start.service == self.turns[start.place]
            self.open.remove(start.place)
            self.starts[start.service] = self.now
            self.started[start.service] += 1
            playing = self._playing[start.number] = {}
            self._ended[start.number] = [None] * self.limits.group_size
            for number in range(self.limits.group_size):
                assert (start.number, number) not in self.outcome
                self.outcome[start.number, number] = "running"
                self.num_permits += 1
                playing[number] = _Episode(start, number)
                self._later(self.random.expovariate(4.0), "first_token", (start.number, number))
        has_room = self.num_permits + self.limits.group_size <= max(self.plan.concurrency, self.limits.group_size)
        assert not has_room or self._first_open() is None, "a group could start"
        due = self.dispatcher.due(self.now)
        assert not has_room or due == self._next_by_rate()
        if due is not None and due != self._next_fill:
            self._next_fill = due
            self._at(due, "due")

    def _due(self, _: None) -> None:
        self._next_fill = None
        self._fill()

    def _with_room(self) -> dict[str, float]:
        """When each service may start that has an open place, by its rate, and has room, by its concurrency."""
        size, playing = self.limits.group_size, self._num_playing()
        found: dict[str, float] = {}
        for name in {self.turns[place] for place in self.open}:
            most, rate = self.services[name].concurrency, self.services[name].rate
            if most is None or not playing[name] or playing[name] + size <= most:
                found[name] = self.now if rate is None else max(self.now, self.starts[name] + 60 * size / rate)
        return found

    def _first_open(self) -> int | None:
        """The place whose turn it is."""
        times = self._with_room()
        return min((place for place in self.open if times.get(self.turns[place]) == self.now), default=None)

    def _next_by_rate(self) -> float | None:
        return min((time for time in self._with_room().values() if time > self.now), default=None)

    def _num_playing(self) -> Counter[str]:
        return Counter(one.start.service for each in self._playing.values() for one in each.values())

    def _changed(self, _: None) -> None:
        """Somebody changes a weight or a bound."""
        name = self.random.choice(list(self.services))
        match self.random.choice(["weight", "concurrency", "rate"]):
            case "weight":
                first, weights = (
                    self.dispatcher.first_free,
                    self.weights[-1][1] | {name: self.random.choice([0.5, 4.0])},
                )
                assert first == len(self.turns)
                for wrong in ({}, weights | {name: 0.0}):
                    _must_raise(ConfigError, partial(self.mixture.change, first), wrong)
                self.mixture.change(first, weights)
                self.weights = [one for one in self.weights if one[0] < first] + [(first, weights)]
            case "concurrency":
                self.services[name].concurrency = self.random.choice([None, 1, 2 * self.limits.group_size])
            case "rate":
                self.services[name].rate = self.random.choice(RATES)
        self._fill()

    def _first_token(self, what: tuple[int, int]) -> None:
        group, number = what
        if (episode := self._playing.get(group, {}).get(number)) is None:
            return
        episode.oldest = self.version
        seconds = self.random.lognormvariate(0, 1.0) * (20 if self.random.random() < self.plan.long else 1)
        if self.random.random() < self.plan.failing:
            episode.failure = self.random.choice(["environment", "sandbox", "provider", "tool"])
        self._later(seconds, "episode", what)

    def _episode(self, what: tuple[int, int]) -> None:
        group, number = what
        episode = self._playing.get(group, {}).pop(number, None)
        if episode is None:
            return
        self.outcome[what] = "ended"
        self.num_permits -= 1
        self._ended[group][number] = self._rollout(episode)
        self.dispatcher.episode_ended(group, number)
        if self.random.random() < 0.1:
            self.dispatcher.episode_ended(group, number)  # told again
        if not self._playing[group]:
            del self._playing[group]
            rollouts = [one for one in self._ended.pop(group) if one is not None]
            task = Task(episode.start.service, group, 0, (), {})
            self.sink.add(self.dispatcher.end(group), [Group(group, task, rollouts)])
            if self.random.random() < 0.1:
                _must_raise(AssertionError, self.dispatcher.end, group)
        self._fill()

    def _rollout(self, episode: _Episode) -> Rollout:
        rollout = Rollout(Task(episode.start.service, 0, 0, (), {}), episode.start.number)
        rollout.tree.add(Segment([1]))
        if episode.oldest is not None and self.random.random() > 0.02:  # a few have no token
            count = self.random.randint(1, 9)
            versions = sorted(self.random.randint(episode.oldest, self.version) for _ in range(count))
            versions[0] = episode.oldest
            rollout.tree.add(Segment([2] * count, 0, True, [-1.0] * count, versions))
        rollout.failure = episode.failure
        if rollout.failure in EXCLUDED:
            (self.given_up if rollout.failure == "stale" else self.excluded).add(id(rollout))
            self.kept_alive.append(rollout)
        return rollout

    def _try_batch(self) -> None:
        version = self._version_at(self.step)
        dropped, stale = self.sink.sweep(version), list[Rollout]()
        for ended in dropped:
            self._account(ended, "dropped")
            assert not self._is_usable(ended, version), "a group was dropped that could be trained"
            self.dispatcher.reopen(ended.start)
            self.open.add(ended.start.place)
        for ended in [*dropped, *self.sink.held]:
            (group,) = ended.groups
            for rollout in group.rollouts:
                oldest = rollout.tree.oldest_version
                is_old = oldest is not None and version - oldest > self.limits.max_staleness
                marked = rollout.is_withheld, rollout.failure == "stale"
                is_old |= id(rollout) in self.given_up
                if id(rollout) in self.excluded or not is_old:
                    assert marked == (False, False)
                    continue
                assert marked == (self.plan.stale == "withhold", self.plan.stale == "drop")
                if id(rollout) not in self.stale:
                    self.stale.add(id(rollout))
                    self.kept_alive.append(rollout)
                    stale.append(rollout)
        drops, self.sink.drops = self.sink.drops, type(self.sink.drops)()
        assert (drops.groups, drops.rollouts) == (len(dropped), len(stale))
        assert drops.lengths == Counter(map(_below, stale))
        quota = self.dispatcher.quota(self.step)
        held = Counter(one.start.service for one in self.sink.held)
        assert self.sink.has(quota) == (quota <= held)
        if not quota <= held:
            self._fill()
            return
        if self.plan.stale == "drop" and self._give_up():
            self._try_batch()
            return
        numbers = {
            name: sorted(one.start.number for one in self.sink.held if one.start.service == name) for name in quota
        }
        taken = self.sink.take(quota)
        first = [number for name, count in quota.items() for number in numbers[name][:count]]
        assert [one.start.number for one in taken] == sorted(first), "not those that started first"
        places = range(self.step * self.limits.groups, (self.step + 1) * self.limits.groups)
        assert Counter(one.start.service for one in taken) == Counter(self.turns[place] for place in places)
        for ended in taken:
            self._account(ended, "trained")
            self._check_trained(ended, version)
            self.trained[ended.start.service] += 1
        self.is_training = True
        self._later(self.random.lognormvariate(0, 0.5), "updated")

    def _give_up(self) -> bool:
        """Groups that are old enough to be stale in the next step end, if that leaves more than half of them."""
        next_version, size = self._version_at(self.step + 1), self.limits.group_size
        late = {
            number
            for number, playing in self._playing.items()
            if next_version - next(iter(playing.values())).start.version > self.limits.max_staleness
            and 2 * (size - len(playing)) > size
        }
        assert set(self.dispatcher.overdue(self.step)) == late
        for group in late:
            for number in list(self._playing[group]):
                self._playing[group][number].failure = "stale"
                self._episode((group, number))
        return bool(late)

    def _is_usable(self, ended: Ended, version: int) -> bool:
        """By the rules as the report has them, written down once more."""
        (group,) = ended.groups
        fit = [
            one
            for one in group.rollouts
            if one.tree.num_sampled and one.failure in (None, "tool") and one.tree.oldest_version is not None
        ]
        fresh = [one for one in fit if version - (one.tree.oldest_version or 0) <= self.limits.max_staleness]
        if self.plan.stale == "withhold":
            return 2 * len(fit) > len(group.rollouts) and bool(fresh)
        return 2 * len(fresh) > len(group.rollouts)

    def _check_trained(self, ended: Ended, version: int) -> None:
        (group,) = ended.groups
        kept, _ = repair([group])
        assert kept, "a group was trained that repair drops"
        assert sum(kept[0].copies) == len(group.rollouts)
        rollouts = [one for one in kept[0].rollouts if not one.is_withheld]
        assert rollouts
        for one in rollouts:
            oldest = one.tree.oldest_version
            assert oldest is not None
            assert one.failure not in EXCLUDED
            assert version - oldest <= self.limits.max_staleness, "stale"

    def _account(self, ended: Ended, outcome: str) -> None:
        for number in range(self.limits.group_size):
            place = (ended.start.number, number)
            assert self.outcome[place] == "ended", f"{place} was {self.outcome[place]} before"
            self.outcome[place] = outcome

    def _updated(self, _: None) -> None:
        self.is_training = False
        self.step += 1
        if self.random.random() < self.plan.dying:
            self._die()
        if self._version_at(self.step) > self.version:
            self.is_training = True  # the trainer waits for the push
            self._later(self.random.expovariate(5.0), "pushed")
        self._fill()

    def _pushed(self, _: None) -> None:
        self.is_training = False
        before, self.version = self._num_admitted(), self._version_at(self.step)
        self.open |= set(range(before, self._num_admitted()))
        self.turns += map(self.mixture.draw, range(before, self._num_admitted()))
        self.dispatcher.pushed(self.version)
        if self.random.random() < 0.2:
            self.dispatcher.pushed(self.version)  # an engine that was started again
            _must_raise(TrainingError, self.dispatcher.pushed, self.version - 1)
        self._fill()

    def _die(self) -> None:
        """The engine has ended: all that is under way is cancelled."""
        for number in list(self._playing):
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        playing = self._playing.pop(number)
        self.num_permits -= len(playing)
        for episode in range(self.limits.group_size):
            assert self.outcome[number, episode] in ("running", "ended")
            self.outcome[number, episode] = "cancelled"
        self._ended.pop(number)
        start = self.dispatcher.cancel(number)
        self.open.add(start.place)
        self.cancelled[start.service] += 1

    def _drain(self) -> None:
        self.dispatcher.is_draining = True
        self._die()
        assert self.dispatcher.next(self.now) is None
        self._check()
        assert self.dispatcher.in_flight == 0
        assert not self.dispatcher.running
        for ended in self.sink.held:
            self._account(ended, "held")
        assert not {"running", "ended"} & set(self.outcome.values()), "an episode was lost"
        for one in self.services.values():
            assert (one.started, one.cancelled) == (self.started[one.name], self.cancelled[one.name])
            assert one.ended == one.started - one.cancelled
            assert one.in_flight == 0
        self._check_ratios()

    def _check_ratios(self) -> None:
        """Every place has the environment that it had when it was opened, and these are as the weights say."""
        assert self.turns == [self.mixture.draw(place) for place in range(len(self.turns))]
        bounds = [first for first, _ in self.weights[1:]] + [len(self.turns)]
        for (first, weights), last in zip(self.weights, bounds, strict=True):
            counts = Counter(self.turns[first:last])
            for name, weight in weights.items():
                wanted = (last - first) * weight / sum(weights.values())
                assert abs(counts[name] - wanted) <= 0.02 * (last - first) + 3, f"{counts} by {weights}"

    def _check(self) -> None:
        assert self.dispatcher.in_flight == self.num_permits
        assert self.num_permits <= max(self.plan.concurrency, self.limits.group_size)
        assert not self.is_training or self.dispatcher.version == self.version
        assert self._num_playing() == Counter(
            {name: one.in_flight for name, one in self.services.items() if one.in_flight}
        )
        covered = Counter(one.service for one in self.dispatcher.running)
        covered += Counter(ended.start.service for ended in self.sink.held)
        num_trained = self.plan.first_step * self.limits.groups + self.trained.total()
        assert num_trained + covered.total() + len(self.open) == self._num_admitted()


def _must_raise(kind: type[Exception], call: Callable[[Any], object], argument: Any) -> None:
    try:
        call(argument)
    except kind:
        return
    raise AssertionError(f"{call} of {argument} was taken")


def _below(rollout: Rollout) -> int:
    """The power of two that its number of sampled tokens is below."""
    return next(1 << bits for bits in range(64) if rollout.tree.num_sampled < 1 << bits)
