"""The saved state of a run: one file, replaced atomically. Killed at any moment, the same command goes on from it.

OUT/state.pt      the step, weights, optimizer state, the positions of ladders, tasks that were asked and not trained
OUT/metrics.jsonl a line a step; lines of steps that a resumed run repeats are removed
OUT/policy        the checkpoint of the last state, in the published layout
OUT/records       rollouts, and earlier states (rl/records/store.py)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from glm5.common.atomic import atomic_write
from glm5.common.errors import TrainingError
from glm5.config.rl import RLRecipe
from glm5.train.sharded_state import DAMAGED, check_bytes, damaged
from glm5.train.state import first_difference, writing_to

CHANGEABLE_KEYS = {
    *("out", "device", "ray", "trainer", "peak_tflops", "steps", "workers", "records", "evaluation"),
    *("tensorboard", "wandb"),
}
"""Keys of a recipe that may change when a run is resumed."""


class RunState:
    """The state file of a run in `out`."""

    def __init__(self, out: Path, recipe: RLRecipe) -> None:
        self.out, self.file = out, out / "state.pt"
        self._recipe = json.loads(recipe.model_dump_json(exclude=CHANGEABLE_KEYS))

    def read(self) -> Mapping[str, Any] | None:
        """{"step", "ladders", "trainer", ...}; None for a new run. TrainingError if it is damaged or another run's."""
        return self.read_file(self.file) if self.file.exists() else None

    def read_file(self, file: Path) -> Mapping[str, Any]:
        """The same of another file of this run."""
        try:
            check_bytes(file)
            state = torch.load(file, weights_only=True, map_location="cpu")
            recipe = json.loads(state["recipe"])
            int(state["step"])
        except DAMAGED as error:
            raise damaged(file, error) from None
        if difference := first_difference(recipe, self._recipe):
            raise TrainingError(
                f"{self.out} holds a run of another recipe: {difference}; go on with the old one, choose another out, "
                "or throw it away with --restart"
            )
        return state

    def write(
        self,
        step: int,
        ladders: Mapping[str, Any],
        trainer: Mapping[str, Any],
        asynchronous: Mapping[str, Any] | None = None,
    ) -> None:
        """Replace the state. TrainingError if it cannot be written; the previous state is then unchanged."""
        state = {"recipe": json.dumps(self._recipe), "step": step, "ladders": dict(ladders), "trainer": dict(trainer)}
        state["asynchronous"] = asynchronous
        with writing_to(self.file), atomic_write(self.file, "wb") as handle:
            torch.save(state, handle)
