"""Groups whose episodes have ended, until they are trained: staleness, repair, batches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from glm5.rl.orchestrator.dispatcher import Start
from glm5.rl.rollout import Group, Rollout
from glm5.rl.training.repair import num_dropped

Stale = Literal["drop", "withhold"]


@dataclass(frozen=True)
class Ended:
    """What was played of a start: a group, in self-play one for each seat."""

    start: Start
    groups: Sequence[Group]


@dataclass
class Drops:
    """Since they were last read: groups that were dropped, stale rollouts, and the sampled tokens of these, by the
    power of two that their number is below."""

    groups: int = 0
    rollouts: int = 0
    lengths: Counter[int] = field(default_factory=Counter[int])


class Sink:
    """Ended groups in the order in which they came.

    Invariant: a group that is added is handed out exactly once, by `take` (trained) or by `sweep` (dropped).

    A rollout is stale if the weights with which a step starts minus the oldest that sampled one of its tokens, or
    computed a key that one attended to, exceed `max_staleness` (GLM-5 report, section 4.1). "drop": it fails by
    "stale", and its group is repaired, or dropped, as for any other failure. "withhold": its reward counts among those
    of its group, and none of its tokens is trained; a group of which no token is left is dropped.
    """

    def __init__(self, max_staleness: int, stale: Stale) -> None:
        self.max_staleness, self.stale = max_staleness, stale
        self.drops = Drops()
        self._new: list[Ended] = []  # that no sweep has looked at
        self._held: dict[str, list[Ended]] = {}  # that can be trained with weights of `_version`
        self._version: int | None = None

    def add(self, start: Start, groups: Sequence[Group]) -> None:
        """All episodes of a start have ended."""
        self._new.append(Ended(start, groups))
        for rollout in (one for group in groups for one in group.rollouts if one.failure == "stale"):
            self._count(rollout)  # its group did not wait for it

    @property
    def held(self) -> list[Ended]:
        return [one for of_service in (*self._held.values(), self._new) for one in of_service]

    def sweep(self, version: int) -> list[Ended]:
        """Take out what cannot be trained in a step that starts with weights of `version`."""
        if version != self._version:
            self._new, self._held, self._version = self.held, {}, version
        new, self._new, dropped = self._new, [], list[Ended]()
        for ended in new:
            for rollout in (one for group in ended.groups for one in group.rollouts):
                self._mark(rollout, version)
            if _is_trainable(ended):
                self._held.setdefault(ended.start.service, []).append(ended)
            else:
                dropped.append(ended)
        self.drops.groups += len(dropped)
        return dropped

    def has(self, quota: Mapping[str, int]) -> bool:
        """Whether a sweep has left as many groups of each service as `quota` says."""
        return all(len(self._held.get(service, ())) >= count for service, count in quota.items())

    def take(self, quota: Mapping[str, int]) -> list[Ended]:
        """The groups that started first, as many of each service as `quota` says, which are there."""
        taken: list[Ended] = []
        for service, count in quota.items():
            held = sorted(self._held[service], key=lambda ended: ended.start.number)
            taken += held[:count]
            self._held[service] = held[count:]
        return sorted(taken, key=lambda ended: ended.start.number)

    def _mark(self, rollout: Rollout, version: int) -> None:
        oldest = rollout.tree.oldest_version
        if oldest is None or version - oldest <= self.max_staleness or not rollout.is_valid or rollout.is_withheld:
            return
        self._count(rollout)
        if self.stale == "withhold":
            rollout.is_withheld = True
        else:
            rollout.failure = "stale"
            rollout.failure_reason = (
                f"sampled with weights of version {oldest}, and the step starts with version {version}; allowed: "
                f"{self.max_staleness} older"
            )

    def _count(self, rollout: Rollout) -> None:
        self.drops.rollouts += 1
        self.drops.lengths[1 << rollout.tree.num_sampled.bit_length()] += 1


def _is_trainable(ended: Ended) -> bool:
    """Whether a group of it is left after repair, with a token to train."""
    return not num_dropped(ended.groups) and any(
        one.is_valid and not one.is_withheld and one.tree.num_sampled
        for group in ended.groups
        for one in group.rollouts
    )
