"""Which groups of rollouts are under way while the trainer learns."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

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
    """Rollouts and rewards of one environment, as the dispatcher counts them. The report (section 4.1) says that the
    orchestrator controls each task's ratio and "generation speed". The ratio is `service_of` of the dispatcher. Speed
    is taken as two bounds, which may change at any moment: `concurrency`, the most of its episodes at a time (but for a
    single group), and `rate`, the most of them that start in a minute."""

    name: str
    concurrency: int | None = None
    rate: float | None = None
    started: int = 0  # groups, as ended and cancelled
    ended: int = 0
    cancelled: int = 0
    in_flight: int = 0  # episodes
    last_start: float = -inf

    def has_room(self, size: int) -> bool:
        """Whether its concurrency lets a group of `size` start."""
        return self.concurrency is None or self.in_flight + size <= max(self.concurrency, size)

    def due(self, size: int) -> float:
        """When its rate lets a group start after the last one."""
        return -inf if self.rate is None else self.last_start + 60 * size / self.rate


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

    `service_of(place)`: whose turn a place is; for places below `first_free` it must not change. `concurrency`: the
    most episodes at a time, but for a single group; it may change at any moment. `step`: the number of steps that are
    trained already, with their places. Times are seconds of any clock that never goes back.
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
        self.is_draining = False
        self._service_of = service_of
        self._open: dict[str, list[int]] = {name: [] for name in services}
        self._running: dict[int, _Running] = {}

    @property
    def running(self) -> list[Start]:
        return [one.start for one in self._running.values()]

    @property
    def in_flight(self) -> int:
        """Episodes."""
        return sum(one.in_flight for one in self.services.values())

    @property
    def first_free(self) -> int:
        """The first place that has not been given out."""
        return self.limits.num_admitted(self.version)

    def next(self, now: float) -> Start | None:
        """The group to start now; None while nothing may start."""
        size = self.limits.group_size
        if self.is_draining or self.in_flight + size > max(self.concurrency, size):
            return None
        while self._next_place < self.first_free:
            heappush(self._open[self._service_of(self._next_place)], self._next_place)
            self._next_place += 1
        free = [(self._open[one.name][0], one.name) for one in self._with_room() if one.due(size) <= now]
        if not free:
            return None
        place, name = min(free)
        heappop(self._open[name])
        start, service = Start(self.next_number, place, name, self.version), self.services[name]
        self.next_number += 1
        self._running[start.number] = _Running(start, size)
        service.in_flight += size
        service.started += 1
        service.last_start = now
        return start

    def due(self, now: float) -> float | None:
        """After `next` has returned None: the next time at which a rate lets a group start, if one waits for that."""
        waiting = (one.due(self.limits.group_size) for one in self._with_room())
        return min((due for due in waiting if due > now), default=None)

    def episode_ended(self, number: int, episode: int) -> None:
        """An episode of a running group has ended: another may begin. Told again, or of a group that has been taken
        out, it changes nothing."""
        running = self._running.get(number)
        if running is None or episode in running.seen:
            return
        running.seen.add(episode)
        running.missing -= 1
        self.services[running.start.service].in_flight -= 1

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

    def _with_room(self) -> list[Service]:
        """Services with an open place that have not reached their concurrency."""
        size = self.limits.group_size
        return [one for one in self.services.values() if self._open[one.name] and one.has_room(size)]

    def _take(self, number: int) -> Start:
        running = self._running.pop(number, None)
        if running is None:
            raise AssertionError(f"group {number} is not running")
        self.services[running.start.service].in_flight -= running.missing
        return running.start
