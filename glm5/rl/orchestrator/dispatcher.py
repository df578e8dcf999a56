"""Which groups of rollouts are under way while the trainer learns."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from glm5.common.errors import TrainingError


@dataclass(frozen=True)
class Limits:
    """Of asynchronous rollouts. `groups` of a batch, of `group_size` episodes each; `max_staleness` in pushes, of which
    there is one every `push_every` optimizer steps."""

    groups: int
    group_size: int
    max_staleness: int
    push_every: int

    def version_at(self, step: int) -> int:
        """The version of the weights with which a step, counted from 0, starts."""
        return step // self.push_every

    def num_admitted(self, version: int) -> int:
        """Groups that may have started while the engine has the weights of `version`: those of all steps that start
        with weights at most `max_staleness` newer."""
        return (version + self.max_staleness + 1) * self.push_every * self.groups


@dataclass(frozen=True)
class Start:
    """A group to play. `number`: unique in the run. `place`: place n belongs to batch n // groups, and says whose turn
    it is; a group in place of a dropped one has its place. `version`: of the engine's weights when it started."""

    number: int
    place: int
    service: str
    version: int


@dataclass
class Service:
    """Rollouts and rewards of one environment, as the dispatcher counts them. `concurrency`: the most of its groups at
    a time; it may change at any moment."""

    name: str
    concurrency: int | None = None
    started: int = 0
    ended: int = 0
    cancelled: int = 0
    running: int = 0

    @property
    def is_full(self) -> bool:
        return self.concurrency is not None and self.running >= self.concurrency


@dataclass
class _Running:
    start: Start
    missing: int  # episodes that have not ended
    seen: set[int] = field(default_factory=set[int])


class Dispatcher:
    """Starts groups in the order of their places.

    Invariant: a group that `next` returns is taken out exactly once, by `end` (it goes to the sink, with all of its
    episodes) or by `cancel`; the permit of each of its episodes is given back exactly once, by `episode_ended` or with
    its group. A place is open, or covered by one group that is running or in the sink, or trained.

    `service_of(place)`: whose turn a place is. `concurrency`: the most episodes at a time, but for a single group; it
    may change at any moment. `step`: the number of steps that are trained already, with their places.
    """

    def __init__(
        self,
        limits: Limits,
        service_of: Callable[[int], str],
        services: dict[str, Service],
        concurrency: int,
        step: int,
    ) -> None:
        self.limits, self.services, self.concurrency = limits, services, concurrency
        self.version = limits.version_at(step)
        self.next_number = self._next_place = step * limits.groups
        self.in_flight = 0  # episodes
        self.is_draining = False
        self._service_of = service_of
        self._open: dict[str, list[int]] = {name: [] for name in services}
        self._running: dict[int, _Running] = {}

    @property
    def running(self) -> list[Start]:
        return [one.start for one in self._running.values()]

    def next(self) -> Start | None:
        """The group to start now; None while nothing may start."""
        size = self.limits.group_size
        if self.is_draining or self.in_flight + size > max(self.concurrency, size):
            return None
        while self._next_place < self.limits.num_admitted(self.version):
            heappush(self._open[self._service_of(self._next_place)], self._next_place)
            self._next_place += 1
        free = [(places[0], name) for name, places in self._open.items() if places and not self.services[name].is_full]
        if not free:
            return None
        place, name = min(free)
        heappop(self._open[name])
        start = Start(self.next_number, place, name, self.version)
        self.next_number += 1
        self._running[start.number] = _Running(start, size)
        self.in_flight += size
        self.services[name].started += 1
        self.services[name].running += 1
        return start

    def episode_ended(self, number: int, episode: int) -> None:
        """An episode of a running group has ended: another may begin. Told again, or of a group that has been taken
        out, it changes nothing."""
        running = self._running.get(number)
        if running is None or episode in running.seen:
            return
        running.seen.add(episode)
        running.missing -= 1
        self.in_flight -= 1

    def end(self, number: int) -> Start:
        """All episodes of a group have ended."""
        start = self._take(number)
        self.services[start.service].ended += 1
        return start

    def cancel(self, number: int) -> Start:
        """A group will not end: its place is open again."""
        start = self._take(number)
        self.services[start.service].cancelled += 1
        self.reopen(start)
        return start

    def reopen(self, start: Start) -> None:
        """A group that ended was dropped: another takes its place."""
        heappush(self._open[start.service], start.place)

    def overdue(self, step: int) -> list[int]:
        """Running groups that will be stale in every step after `step`, of which more than half of the episodes have
        ended: without the others they can still be trained."""
        oldest = self.limits.version_at(step + 1) - self.limits.max_staleness
        ending = (one.start for one in self._running.values() if len(one.seen) > one.missing)
        return [start.number for start in ending if start.version < oldest]

    def pushed(self, version: int) -> None:
        """The engine has weights of `version`."""
        if version < self.version:
            raise TrainingError(f"the engine went from weights of version {self.version} back to {version}")
        self.version = version

    def quota(self, step: int) -> Counter[str]:
        """How many groups of each service the batch of a step has."""
        places = range(step * self.limits.groups, (step + 1) * self.limits.groups)
        return Counter(map(self._service_of, places))

    def _take(self, number: int) -> Start:
        running = self._running.pop(number, None)
        if running is None:
            raise AssertionError(f"group {number} is not running")
        self.in_flight -= running.missing
        self.services[running.start.service].running -= 1
        return running.start
