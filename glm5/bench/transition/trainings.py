"""Splits a recipe's transition into trainings that depend on each other only through checkpoints.

    dense      the stages before warm-up                                                from the recipe's start
    dsa        warmup and sparse                                                        from dense's checkpoint
    control    the sparse stage's steps, data and rates under another attention         from dense's checkpoint

so every control has the sparse stage's data and number of steps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from glm5.common.errors import ConfigError
from glm5.config.step import WindowConfig
from glm5.config.train import ModelSection, Recipe, StageConfig


class Transition:
    """Recipes of one seed's trainings under `out`. Raises ConfigError if the recipe has no transition."""

    def __init__(self, recipe: Recipe, seed: int, out: Path) -> None:
        kinds = [stage.kind for stage in recipe.stage]
        if kinds[-2:] != ["warmup", "sparse"] or len(kinds) < 3 or not {*kinds[:-2]} <= {"pretrain", "midtrain"}:
            raise ConfigError(
                f"{recipe.name}: got stages {', '.join(kinds)}; needed: pretrain or midtrain, then warmup, then sparse"
            )
        self.recipe, self.seed, self.out = recipe, seed, out
        *self._dense, self._warmup, self.sparse = recipe.stage

    def dense(self) -> Recipe:
        return self._part("dense", self.recipe.model, self._dense)

    def dsa(self) -> Recipe:
        return self._part("dsa", self._from_dense(), [self._warmup, self.sparse])

    def control(self, name: str, window: WindowConfig | None) -> Recipe:
        """Dense attention (None) or windows, with the steps of the sparse stage."""
        change = {"kind": "midtrain", "keys": None, "window": window}
        return self._part(name, self._from_dense(), [self.sparse.model_copy(update=change)])

    def _part(self, name: str, model: ModelSection, stages: Sequence[StageConfig]) -> Recipe:
        change: Mapping[str, object] = {
            "name": name,
            "seed": self.seed,
            "out": str(self.out / f"seed-{self.seed}" / name),
            "model": model,
            "stage": tuple(stages),
        }
        return self.recipe.model_copy(update=change)

    def _from_dense(self) -> ModelSection:
        checkpoint = self.dense().folder / self._dense[-1].name / "last"
        change = {
            "preset": None,
            "checkpoint": str(checkpoint),
            "tokenizer": None,
            "tokenizer_files": (),
            "digits_per_token": 1,
            "config": {},
        }
        return self.recipe.model.model_copy(update=change)
