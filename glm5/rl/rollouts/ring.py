"""Which engine plays which group: consistent hashing with bounded loads.

    a key's member is the first one clockwise of the key's hash whose load stays below `BALANCE` times the mean

So an engine that leaves moves its own keys alone, one that joins takes few, and none is far above the mean. What has
a key stays where it was placed, since its pages of keys and values are there. (Mirrokni, Thorup, Zadimoghaddam:
Consistent Hashing with Bounded Loads, 2018; GLM-5 report, section 4.1, from rollouts to ranks of data parallelism.)
"""

from bisect import bisect, insort
from collections.abc import Hashable, Iterator
from math import ceil

from glm5.rl.segments import seed_of

BALANCE = 1.25
"""The most load of a member, as a multiple of the mean."""
POINTS = 64
"""Places of a member on the ring."""


class HashRing:
    """Members and what is placed on them; a key's load is a number of rollouts."""

    def __init__(self) -> None:
        self._points = list[tuple[int, int]]()
        self._placed = dict[Hashable, tuple[int, int]]()
        self.loads = dict[int, int]()

    def add(self, member: int) -> None:
        """It takes keys from now on."""
        self.loads[member] = 0
        for point in range(POINTS):
            insort(self._points, (seed_of("member", member, point), member))

    def remove(self, member: int) -> None:
        """Its keys are placed elsewhere, with their loads; where it was the last one, they are forgotten."""
        moved = {key: load for key, (own, load) in self._placed.items() if own == member}
        del self.loads[member]
        self._points = [point for point in self._points if point[1] != member]
        self._placed = {key: placed for key, placed in self._placed.items() if key not in moved}
        for key, load in moved.items() if self.loads else ():
            self.place(key, load)

    def place(self, key: Hashable, load: int = 1) -> int:
        """The member of a key, which is placed unless it has a place. LookupError without members."""
        if key not in self._placed:
            bound = self._bound(load)
            member = next(one for one in self._clockwise(key) if self.loads[one] + load <= bound)
            self._placed[key] = member, load
            self.loads[member] += load
        return self._placed[key][0]

    def release(self, key: Hashable) -> None:
        """The key is done, whether it has a place or not."""
        if (placed := self._placed.pop(key, None)) is not None:
            self.loads[placed[0]] -= placed[1]

    def rebalance(self) -> int:
        """Move keys away from members above the bound, the youngest first; returns how many moved. It costs what the
        moved keys had cached, so it is for moments when nothing is: after a push."""
        moved = 0
        for key, (member, load) in reversed(list(self._placed.items())):
            if self.loads[member] > self._bound(0) and min(self.loads.values()) + load < self.loads[member]:
                self.release(key)
                moved += self.place(key, load) != member
        return moved

    def _bound(self, load: int) -> int:
        """There is always a member that a key of this load does not take above it."""
        if not self.loads:
            raise LookupError("the ring has no members")
        mean = (sum(self.loads.values()) + load) / len(self.loads)
        return max(ceil(BALANCE * mean), min(self.loads.values()) + load)

    def _clockwise(self, key: Hashable) -> Iterator[int]:
        first = bisect(self._points, (seed_of("key", str(key)), -1))
        yield from (member for _, member in self._points[first:] + self._points[:first])
