"""Results of a run as JSON, by arm and seed, and what they say about a claim.

held            the 95 % interval of the mean over seeds lies within the claim's bounds        Student's t, paired seeds
not held        it lies outside of them
not decided     it does neither; with one seed, the value alone is compared
"""

import platform
import time
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field

from glm5 import __version__
from glm5.bench.report import processor
from glm5.common.atomic import atomic_write_json
from glm5.common.bounded import TABLES, read_bounded_text
from glm5.common.errors import DataError
from glm5.config.report import ClaimSection, Figure

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t, two-sided, of 1 to 9 degrees of freedom."""
Number = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]


class Outcome(NamedTuple):
    """`left`, `right`: values by seed, `seeds`. `mean`, `half`: of the differences, with half of the interval's width;
    0 for one value. `num_seeds`: more than values where these are means over seeds."""

    seeds: list[str]
    num_seeds: int
    left: list[float]
    right: list[float]
    mean: float
    half: float
    verdict: str


class _Arm(BaseModel):
    settings: list[str]
    seeds: Annotated[dict[str, dict[str, Number]], Field(max_length=len(T_95) + 1)]


class _Document(BaseModel, extra="allow"):
    arms: dict[str, _Arm]
    processor: str = ""
    date: str = ""
    note: str = ""
    num_seeds: int = 1


class Results:
    """The file of a run's results. Raises DataError where it is not such a file."""

    def __init__(self, folder: Path, run: str) -> None:
        self.file = folder / f"{run}.json"
        self.document: dict[str, Any] = {"arms": {}}
        if not self.file.exists():
            return
        try:
            text = read_bounded_text(self.file, TABLES, DataError)
            self.document = _Document.model_validate_json(text).model_dump(exclude_unset=True)
        except ValueError:
            raise DataError(f"{self.file}: not results of glm5 report; delete it, and measure again") from None

    def seeds(self, arm: str, settings: Sequence[str] | None = None) -> Mapping[str, Mapping[str, float]]:
        """Metrics by seed; none if the arm was measured with other `settings`."""
        found = self.document["arms"].get(arm)
        if found is None or (settings is not None and found["settings"] != list(settings)):
            return {}
        return found["seeds"]

    def add(self, arm: str, settings: Sequence[str], seed: int, metrics: Mapping[str, float]) -> None:
        kept = self.seeds(arm, settings)
        self.document |= {"processor": processor(), "torch": str(torch.__version__), "glm5": __version__}
        self.document |= {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
        found = {"settings": list(settings), "seeds": {**kept, str(seed): dict(metrics)}}
        self.document["arms"] = {**self.document["arms"], arm: found}
        atomic_write_json(self.file, self.document)

    def outcome(self, claim: ClaimSection) -> Outcome | None:
        """None where a figure has no seed yet."""
        assert claim.left is not None, "checked by the registry"
        left, right = self._values(claim.left), {} if claim.right is None else self._values(claim.right)
        seeds = [seed for seed in left if claim.right is None or seed in right]
        if not seeds:
            return None
        pairs = [(left[seed], right.get(seed, 0.0)) for seed in seeds]
        differences = [one - other for one, other in pairs]
        half = interval(differences)
        verdict = decided(fmean(differences), half, claim.low, claim.high)
        of_right = [] if claim.right is None else [other for _, other in pairs]
        num_seeds = self.document.get("num_seeds", len(seeds))
        return Outcome(seeds, num_seeds, [one for one, _ in pairs], of_right, fmean(differences), half, verdict)

    def _values(self, figure: Figure) -> dict[str, float]:
        arm, metric = figure
        return {seed: found[metric] for seed, found in sorted(self.seeds(arm).items()) if metric in found}


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean; 0 of a single value. At most ten values."""
    count = len(values)
    return T_95[count - 2] * stdev(values) / sqrt(count) if count > 1 else 0.0


def decided(mean: float, half: float, low: float | None, high: float | None) -> str:
    """The verdict on an interval."""
    low, high = float("-inf") if low is None else low, float("inf") if high is None else high
    if low <= mean - half and mean + half <= high:
        return "held"
    return "not held" if mean + half < low or high < mean - half else "not decided"
