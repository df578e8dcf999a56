"""Which environment and level each group of a run draws its task from.

The share of every entry is its weight among all, realised to within 1 % from a few hundred draws on (and within a few
draws at any time): draw number n takes the entry at the fractional part of n / golden ratio, which fills the unit
interval more evenly than random numbers do. A draw depends on its number alone, so a run that goes on needs no state.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from glm5.common.errors import ConfigError

_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd


@dataclass(frozen=True)
class Entry:
    """Tasks of one level of an environment; `level` None: of the level at which its ladder stands."""

    environment: str
    level: int | None
    weight: float


class Mixture:
    """`weights`: of the environments. `levels`: of each environment, a weight by level; an environment that is missing
    there climbs a ladder. Raises ConfigError."""

    def __init__(self, weights: Mapping[str, float], levels: Mapping[str, Mapping[int, float]] | None = None) -> None:
        levels = levels or {}
        _check("the mixture", weights)
        for name, of_levels in levels.items():
            if name not in weights:
                raise ConfigError(f"levels of {name!r}, which is not in the mixture: {', '.join(weights)}")
            _check(f"the levels of {name}", of_levels)
        self.entries = [
            Entry(name, level, weight * share)
            for name, weight in weights.items()
            for level, share in _shares(levels.get(name)).items()
        ]
        self._ends = list(accumulate(entry.weight for entry in self.entries))

    def draw(self, number: int) -> Entry:
        """The entry of draw `number`, from 0."""
        place = (number * _STEP % 2**64) / 2**64 * self._ends[-1]
        return self.entries[min(bisect_right(self._ends, place), len(self.entries) - 1)]


def _check(what: str, weights: Mapping[str, float] | Mapping[int, float]) -> None:
    if not weights or not all(0 < weight < float("inf") for weight in weights.values()):
        raise ConfigError(f"{what}: weights must be numbers above 0, got {dict(weights)}")


def _shares(levels: Mapping[int, float] | None) -> Mapping[int | None, float]:
    if levels is None:
        return {None: 1.0}
    total = sum(levels.values())
    return {level: weight / total for level, weight in levels.items()}
