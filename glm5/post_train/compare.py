"""What became of a skill: gained, forgotten and given back by stage, and a paired interval of two models.

    gained       score of a stage - score of the stage before, where above 0; forgotten: where below
    given back   of what was lost since the best stage before, the part that a later stage brings back

The interval is a paired bootstrap (Efron, Tibshirani 1993, chapter 13): tasks are drawn with replacement, the
differences of both models' rewards on them are averaged, and the 2.5 and 97.5 % quantiles of many such means are its
ends. Differences take few values, so their counts are drawn at once, which is the same distribution.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000

Rewards = Sequence[float | None]
"""Of each task; None where an episode failed by a fault that the policy did not cause."""


@dataclass(frozen=True)
class Difference:
    """Mean reward of the second model minus that of the first, with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float
    num_tasks: int

    def is_within(self, margin: float) -> bool:
        """Whether the second loses at most `margin`, the interval included."""
        return self.low >= -margin


def score(rewards: Rewards) -> float:
    """Mean over the tasks that were played; 0 without any."""
    found = [reward for reward in rewards if reward is not None]
    return sum(found) / len(found) if found else 0.0


def paired(first: Rewards, second: Rewards, seed: int = 0) -> Difference:
    """Over the tasks that both played. ValueError where they are of other tasks, or there is none."""
    found = [b - a for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not found:
        raise ValueError("no task that both models played")
    values, counts = np.unique(np.array(found), return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(found), counts / len(found), RESAMPLES)
    means = drawn @ values / len(found)
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(np.mean(found)), float(low), float(high), len(found))


def changes(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """By stage what was gained, forgotten and given back; the scores are those of the stages in their order."""
    found, before, best = dict[str, dict[str, float]](), 0.0, 0.0
    for name, now in scores.items():
        rise = max(now - before, 0.0)
        back = min(rise, best - before)
        found[name] = {"gained": rise - back, "forgotten": max(before - now, 0.0), "given back": back}
        before, best = now, max(best, now)
    return found
