"""Which environment each group of a run draws its task from.

The share of each is its weight among all, realised to within 1 % from a few hundred draws on (and within a few draws at
any time): draw number n takes the one at the fractional part of n / golden ratio, which fills the unit interval more
evenly than random numbers do. A draw depends on its number alone, and on the weights that hold from some number on.
"""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

from glm5.common.errors import ConfigError

_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd


class Mixture:
    """`weights`: of the environments. `changes`: the first draws with other weights, and these. Raises ConfigError."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.changes: list[tuple[int, dict[str, float]]] = []
        self.change(0, weights)

    def change(self, first: int, weights: Mapping[str, float]) -> None:
        """Draws from `first` on have these weights, those before it what they had."""
        if not weights or not all(0 < weight < float("inf") for weight in weights.values()):
            raise ConfigError(f"the mixture: weights must be numbers above 0, got {dict(weights)}")
        while self.changes and self.changes[-1][0] >= first:
            self.changes.pop()
        if not self.changes or self.changes[-1][1] != weights:
            self.changes.append((first, dict(weights)))

    def draw(self, number: int) -> str:
        """The environment of draw `number`, from 0."""
        weights = self.changes[bisect_right(self.changes, number, key=lambda change: change[0]) - 1][1]
        names, ends = list(weights), list(accumulate(weights.values()))
        place = (number * _STEP % 2**64) / 2**64 * ends[-1]
        return names[min(bisect_right(ends, place), len(names) - 1)]
