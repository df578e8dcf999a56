"""Predicts asynchronous runs: seconds of a step, episodes that become stale, and which concurrency and how many engines
are best.

    lengths and latencies of an earlier run (or the recipe's limits)
        -> the run's own dispatcher and sink, on a clock that is counted -> time/step, wait/..., staleness/dropped_share

An engine with b sequences gives each of them a token every step_s + token_s * b seconds. An episode samples and waits
for its environment in turns. Lengths and latencies are drawn independently of each other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import NormalDist, fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5.config.rl import RLRecipe
from glm5.rl.build import num_rollouts
from glm5.rl.environments.mixture import Mixture
from glm5.rl.environments.protocol import Task
from glm5.rl.orchestrator.dispatcher import Dispatcher, Limits, Service
from glm5.rl.orchestrator.sink import Sink
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import Segment
from glm5.rl.waits import QUANTILES, in_words
from glm5.rl.watch import is_number

CALIBRATED = 20
"""Steps that a prediction needs at least."""
_EPISODES, _LEAST_STEPS, _MOST_TURNS = 4000, 9, 8  # of a simulation; an episode of more turns has longer ones
_NEAR = 1.05  # of the fastest: fewer engines or rollouts that take no longer are as good
_MOST, _TAIL = 1e6, 4.0  # seconds and tokens that are believed; of the longest episode of a step, where more are drawn


@dataclass(frozen=True)
class Profile:
    """Seconds of a decoding step and of each of its tokens, of a trainer's step and of a push; those of an episode that
    neither engine nor environment explains; of each environment the QUANTILES of "tokens" and "environment_s", and
    "turns". `source` says where they come from."""

    step_s: float
    token_s: float
    train_s: float
    push_s: float
    other_s: float
    episodes: Mapping[str, Mapping[str, Sequence[float]]]
    source: str


def measured_profile(recipe: RLRecipe, lines: Sequence[Mapping[str, Any]]) -> Profile | None:
    """Medians of an earlier run's last 100 steps, without its first third, in which short episodes end before long
    ones; None where it has fewer steps than CALIBRATED."""
    steps = [
        {name: value for name, value in one.items() if is_number(value)}
        for one in lines
        if {"engines/step_s", "time/push"} <= one.keys()
    ]
    if len(steps) < CALIBRATED:
        return None
    steps = steps[len(steps) // 3 :][-100:]

    def of(name: str, least: float = 0.0) -> float:
        found = median([one[name] for one in steps if one.get(name, -1.0) >= least] or [0.0])
        return min(max(found, 0.0), _MOST) if math.isfinite(found) else 0.0

    episodes: dict[str, Mapping[str, Sequence[float]]] = {}
    for name in (one.name for one in recipe.environment):
        own = f"/{name}" if any(f"episode/turns/{name}" in one for one in steps) else ""
        columns = {key: [of(f"episode/{key}_{at}{own}") for at in QUANTILES] for key in ("tokens", "environment_s")}
        episodes[name] = columns | {"turns": [of(f"episode/turns{own}")]}
    pushing = fmean(one.get("time/push", 0.0) for one in steps) / 2  # steps without a push take less
    train, push = of("time/train") + of("time/record"), of("time/push", pushing)
    step, token, sampling = of("engines/step_s"), of("engines/token_s"), of("episode/s") - of("episode/environment_s")
    # As many sequences at a time as come in a second, times the seconds that each takes (Little's law).
    at_once = of("perf/rollout_tok_s") * sampling / max(1.0, of("episode/tokens")) / _num_engines(recipe)
    other = max(0.0, sampling - of("episode/tokens") * (step + token * at_once))
    return Profile(step, token, train, push, other, episodes, f"the medians of {len(steps)} steps in {recipe.folder}")


def bound(recipe: RLRecipe, token_s: float, train_s: float) -> Profile:
    """Without an earlier run: every episode has as many tokens as fit, in one turn, and environments answer at once."""
    own = {"tokens": [recipe.rollouts.max_model_len] * 4, "environment_s": [0.0] * 4, "turns": [1.0]}
    source = f"the recipe's limits, without latency: a run of {CALIBRATED} steps measures both"
    return Profile(0.0, token_s, train_s, 0.0, 0.0, {one.name: own for one in recipe.environment}, source)


def predicted(
    recipe: RLRecipe, profile: Profile, *, concurrency: int | None = None, engines: int | None = None
) -> dict[str, float]:
    """FIGURES of a run by this recipe, or with another concurrency or number of engines."""
    concurrency = concurrency or num_rollouts(recipe)
    return _Simulation(recipe, profile, concurrency, engines or _num_engines(recipe)).run()


def advice(recipe: RLRecipe, profile: Profile) -> list[str]:
    """Lines of `--dry-run`."""
    assert recipe.asynchronous is not None
    rollouts, now, engines = recipe.rollouts, num_rollouts(recipe), _num_engines(recipe)
    most = min(1024, (recipe.asynchronous.max_staleness + 1) * rollouts.groups * rollouts.group_size)
    tried = {min(max(rollouts.group_size, now * 2**power // 4), most) for power in range(5)}
    by_number = {one: predicted(recipe, profile, concurrency=one) for one in sorted({now, *tried})}
    own = by_number[now]
    by_engines = {
        one: own if one == engines else predicted(recipe, profile, engines=one) for one in sorted({1, 2, 4, engines})
    }
    work = engines * (1 - own["wait/engines"]) * own["time/step"]
    share = 100 * work / max(work + profile.train_s, 1e-9)
    split = f"engines {work:.3g} s, trainer {profile.train_s:.3g} s; {share:.0f} % of all devices are for rollouts"
    return [
        f"asynchronous: about {in_words(own)} ({profile.source})",
        f"  by rollouts.concurrency: {_listed(by_number)}; best {_best(by_number)}",
        f"  by engines: {_listed(by_engines)}; best {_best(by_engines)}",
        f"  work of a step: {split}",
    ]


def _num_engines(recipe: RLRecipe) -> int:
    return max(1, len(recipe.rollouts.devices))


def _listed(found: Mapping[int, Mapping[str, float]]) -> str:
    return ", ".join(
        f"{number} {one['time/step']:.3g} s ({100 * one['staleness/dropped_share']:.0f} % stale)"
        for number, one in found.items()
    )


def _best(found: Mapping[int, Mapping[str, float]]) -> int:
    fastest = min(one["time/step"] for one in found.values())
    return min(number for number, one in found.items() if one["time/step"] <= _NEAR * fastest)


class _Engine:
    """`given`: tokens that each sequence that was there all the time has got."""

    def __init__(self, profile: Profile) -> None:
        self.profile, self.load, self.busy_s = profile, 0, 0.0
        self.goals: list[tuple[float, int, _Episode]] = []
        self._given = self._at = 0.0

    def add(self, now: float, order: int, episode: "_Episode") -> None:
        self.advance(now)
        heappush(self.goals, (self._given + episode.tokens, order, episode))

    def advance(self, now: float) -> None:
        if self.goals:
            self._given += (now - self._at) / self._round_s
            self.busy_s += now - self._at
        self._at = now

    def next(self) -> float:
        """When a sequence ends."""
        return self._at + max(0.0, self.goals[0][0] - self._given) * self._round_s if self.goals else math.inf

    @property
    def _round_s(self) -> float:
        return max(1e-12, self.profile.step_s + self.profile.token_s * len(self.goals))


@dataclass
class _Episode:
    """`tokens` and `environment_s` of a turn, of which there are `turns` more."""

    group: int
    index: int
    engine: _Engine
    turns: int
    tokens: float
    environment_s: float


class _Simulation:
    """A run from its beginning, on a clock that is counted, as AsyncRollouts and the loop conduct it."""

    def __init__(self, recipe: RLRecipe, profile: Profile, concurrency: int, num_engines: int) -> None:
        cfg, rollouts = recipe.asynchronous, recipe.rollouts
        assert cfg is not None
        self.limits = Limits(rollouts.groups, rollouts.group_size, cfg.max_staleness, cfg.push_every)
        self.profile, self.random = profile, np.random.default_rng(0)
        mixture = Mixture({one.name: one.weight for one in recipe.environment})
        services = {one.name: Service(one.name, one.concurrency, one.rate) for one in recipe.environment}
        self.dispatcher = Dispatcher(self.limits, mixture.draw, services, concurrency, 0)
        self.sink = Sink(cfg.max_staleness, cfg.stale)
        self.engines = [_Engine(profile) for _ in range(num_engines)]
        self.now, self.step, self._order, self._is_waiting = 0.0, 0, 0, True
        self._quota = self.dispatcher.quota(0)
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._due: float | None = None  # when `_fill` is called because of a rate
        self._playing: dict[int, tuple[_Engine, list[Rollout], set[int]]] = {}
        self._taken: list[float] = []  # when each step got its batch
        self._done: list[float] = []  # and when it ended
        largest = max(0.95, 1 - 0.5 / (rollouts.groups * rollouts.group_size + 1))
        self._places = [NormalDist().inv_cdf(min(share, largest)) for share in QUANTILES.values()]

    def run(self) -> dict[str, float]:
        num_steps = max(_LEAST_STEPS, _EPISODES // (self.limits.groups * self.limits.group_size))
        skipped, at_first = num_steps // 3, (0.0, 0, 0, 0)
        self._fill()
        while self.step < num_steps:
            engine = min(self.engines, key=_Engine.next)
            if self._events and self._events[0][0] <= engine.next():
                self.now, _, action, what = heappop(self._events)
                action(what)
            else:
                self.now = engine.next()
                engine.advance(self.now)
                self._sampled(heappop(engine.goals)[2])
            if self.step == skipped and not at_first[0]:
                at_first = self._totals()
        last = self._totals()
        span, busy_s, stale, groups = (b - a for a, b in zip(at_first, last, strict=True))
        waits = [self._taken[step] - self._done[step - 1] for step in range(skipped, num_steps)]
        played = (groups + (num_steps - skipped) * self.limits.groups) * self.limits.group_size
        return {
            "time/step": span / (num_steps - skipped),
            "wait/trainer": sum(waits) / span,
            "wait/engines": max(0.0, 1 - busy_s / (span * len(self.engines))),
            "staleness/dropped_share": stale / played,
        }

    def _totals(self) -> tuple[float, float, int, int]:
        return (self.now, sum(one.busy_s for one in self.engines), self.sink.drops.rollouts, self.sink.drops.groups)

    def _later(self, seconds: float, action: Callable[[Any], None], what: Any = None) -> None:
        self._order += 1
        heappush(self._events, (self.now + seconds, self._order, action, what))

    def _fill(self) -> None:
        size = self.limits.group_size
        while (start := self.dispatcher.next(self.now)) is not None:
            engine = min(self.engines, key=lambda one: one.load)
            engine.load += size
            task, own = Task(start.service, start.number, 0, (), {}), self.profile.episodes[start.service]
            rollouts = [Rollout(task, start.number) for _ in range(size)]
            self._playing[start.number] = engine, rollouts, set(range(size))
            turns = min(_MOST_TURNS, max(1, round(own["turns"][0])))
            tokens = self._drawn(own["tokens"], size) / turns
            waits = (self._drawn(own["environment_s"], size) + self.profile.other_s) / turns
            for index, rollout in enumerate(rollouts):
                rollout.tree.add(Segment([0], is_sampled=True, logprobs=[0.0], versions=[start.version]))
                self._sample(_Episode(start.number, index, engine, turns, float(tokens[index]), float(waits[index])))
        due = self.dispatcher.due(self.now)
        if due is not None and (self._due is None or due < self._due):
            self._due, self._order = due, self._order + 1
            heappush(self._events, (due, self._order, self._became_due, None))

    def _became_due(self, _: None) -> None:
        self._due = None
        self._fill()

    def _drawn(self, quantiles: Sequence[float], number: int) -> NDArray[np.float64]:
        """From a distribution with these quantiles, log-normal between two of them and above the last, up to `_TAIL`
        times the last."""
        logs, places = np.log(np.maximum(quantiles, 1e-9)), self._places
        z = self.random.standard_normal(number)
        slope = (logs[-1] - logs[-2]) / (places[-1] - places[-2])
        beyond = np.minimum(slope * np.maximum(z - places[-1], 0), math.log(_TAIL))
        return np.exp(np.interp(z, places, logs) + beyond)

    def _sample(self, episode: _Episode) -> None:
        self._order += 1
        episode.engine.add(self.now, self._order, episode)

    def _sampled(self, episode: _Episode) -> None:
        episode.turns -= 1
        self._later(episode.environment_s, self._answered, episode)

    def _answered(self, episode: _Episode) -> None:
        if episode.group not in self._playing:
            return  # its group has not waited for it
        if episode.turns:
            self._sample(episode)
            return
        missing = self._playing[episode.group][-1]
        missing.remove(episode.index)
        self.dispatcher.episode_ended(episode.group, episode.index)
        if not missing:
            self._end(episode.group)
            self._take()
        self._fill()

    def _end(self, number: int) -> None:
        """A group ends, without the episodes that have not."""
        engine, rollouts, missing = self._playing.pop(number)
        engine.load -= self.limits.group_size
        for index in missing:
            rollouts[index].failure = "stale"
        self.sink.add(self.dispatcher.end(number), [Group(number, rollouts[0].task, rollouts)])

    def _take(self) -> None:
        """A batch, where the trainer waits for one."""
        if not self._is_waiting:
            return
        self._sweep()
        if self.sink.has(self._quota):
            for number in self.dispatcher.overdue(self.step) if self.sink.stale == "drop" else ():
                self._end(number)
            self._sweep()
            self.sink.take(self._quota)
            self._is_waiting = False
            self._taken.append(self.now)
            self._later(self.profile.train_s, self._trained)

    def _sweep(self) -> None:
        for ended in self.sink.sweep(self.limits.version_at(self.step)):
            self.dispatcher.reopen(ended.start)

    def _trained(self, _: None) -> None:
        self.step += 1
        self._quota = self.dispatcher.quota(self.step)
        is_due = self.limits.version_at(self.step) > self.dispatcher.version
        self._later(self.profile.push_s if is_due else 0.0, self._pushed)

    def _pushed(self, _: None) -> None:
        self.dispatcher.pushed(self.limits.version_at(self.step))
        self._done.append(self.now)
        self._is_waiting = True
        self._take()
        self._fill()
