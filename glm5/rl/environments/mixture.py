"""Which environment each group of a run draws its task from.

The share of each is its weight among all, realised to within 1 % from a few hundred draws on (and within a few draws at
any time): draw number n takes the one at the fractional part of n / golden ratio, which fills the unit interval more
evenly than random numbers do. A draw depends on its number alone, so a run that goes on needs no state.
"""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

from glm5.common.errors import ConfigError

_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd


class Mixture:
    """`weights`: of the environments. Raises ConfigError."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not weights or not all(0 < weight < float("inf") for weight in weights.values()):
            raise ConfigError(f"the mixture: weights must be numbers above 0, got {dict(weights)}")
        self._names, self._ends = list(weights), list(accumulate(weights.values()))

    def draw(self, number: int) -> str:
        """The environment of draw `number`, from 0."""
        place = (number * _STEP % 2**64) / 2**64 * self._ends[-1]
        return self._names[min(bisect_right(self._ends, place), len(self._names) - 1)]
