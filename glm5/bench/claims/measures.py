"""How an arm is measured, by the name that a run gives. Each takes the run's recipe, settings, a seed and an empty
folder, and returns metrics by name."""

from collections.abc import Callable
from pathlib import Path

from glm5.bench.claims.attention import attention
from glm5.bench.claims.policies import policy
from glm5.bench.claims.small_policy import small_policy
from glm5.bench.claims.trainings import export, heads, retokenise, training

Measure = Callable[[str | None, tuple[str, ...], int, Path], dict[str, float]]
MEASURES: dict[str, Measure] = {
    "attention": attention,
    "export": export,
    "heads": heads,
    "policy": policy,
    "retokenise": retokenise,
    "small-policy": small_policy,
    "training": training,
}
