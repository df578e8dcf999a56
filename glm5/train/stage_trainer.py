"""Trains the stages of a run in this process. The loop uses this interface for distributed runs, too
(`parallel/trainer.py`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from glm5.checkpoint.save import save
from glm5.common.errors import TrainingError
from glm5.config.model import ModelConfig
from glm5.config.train import Recipe, StageConfig
from glm5.train.activation_memory import set_activation_memory
from glm5.train.attention_recall import attention_recall
from glm5.train.batch import Batch
from glm5.train.build import Builder
from glm5.train.data.sources import Row
from glm5.train.evaluate import held_out
from glm5.train.master_weights import MasterWeights
from glm5.train.optim.build import Optimizers
from glm5.train.qat import set_fake_int4
from glm5.train.sharded_state import full_state
from glm5.train.stages import choose_parameters, losses_of, phase_of
from glm5.train.state import Position, Store
from glm5.train.step import Phase, Step


class StageTrainer:
    """A model and its optimizers on one device. `saved`: the state of a resumed run."""

    is_first = True
    """Whether this process writes files and messages."""
    step: Step
    """The step of the current stage."""

    def __init__(self, recipe: Recipe, builder: Builder, saved: Mapping[str, Any] | None) -> None:
        saved = None if saved is None else full_state(saved, builder.out)
        self.recipe, self.builder, self._saved = recipe, builder, saved
        self.device = device_of(recipe.device)
        self.model = builder.model(self.device)
        compute = getattr(torch, recipe.model.compute or recipe.model.dtype)
        self.masters = None if compute == self.model.dtype else MasterWeights(self.model, compute)
        if saved is None:
            return
        if self.masters is None:
            self.model.load_state_dict(saved["model"])
        else:
            self.masters.load_state_dict(self.model, saved["model"])

    def begin(self, stage: StageConfig, cfg: ModelConfig, before: Optimizers | None) -> Step:
        """Begin a stage. `before`: the optimizers of the previous stage, if any."""
        choose_parameters(self.model, stage)
        set_fake_int4(self.model, aware=stage.qat is not None)
        set_activation_memory(self.model, stage.recompute, offload=stage.offload)
        self.model.cfg = cfg
        named = dict(self.model.named_parameters()) if self.masters is None else self.masters.trained()
        optimizers = self._optimizers(named, cfg, stage, before)
        self.step = Step(self.model, optimizers, losses_of(self.recipe, stage, 0), phase_of(stage), self.masters)
        return self.step

    def _optimizers(
        self, named: Mapping[str, nn.Parameter], cfg: ModelConfig, stage: StageConfig, before: Optimizers | None
    ) -> Optimizers:
        """New optimizers, with the saved state of a resumed run, or that of `before` if the stage keeps it."""
        optimizers = Optimizers(named, cfg, stage.optimizer or self.recipe.optimizer)
        if self._saved is not None:
            optimizers.load_state_dict(self._saved["optimizer"])
            self._saved = None
        elif stage.keep_optimizer and before is not None:
            optimizers.load_state_dict(before.state_dict())
        return optimizers

    def share(self, draws: range) -> range:
        """The part of a step's draws that this process trains on."""
        return draws

    def tokens(self, count: int) -> int:
        """Tokens of a step over all processes; `count`: those of this process."""
        return count

    def batches(self, stage: StageConfig, rows: Sequence[Row]) -> list[Batch]:
        size = stage.pass_sequences or stage.sequences
        return [batch_of(rows[at : at + size], self.device) for at in range(0, len(rows), size)]

    def held_out(self, stage: StageConfig, rows: Sequence[Row], phase: Phase) -> dict[str, float]:
        """Metrics of held-out rows."""
        batches = self.batches(stage, rows)
        metrics = held_out(self.model, batches, phase)
        recall = attention_recall(self.model, batches) if phase.learn_index else None
        return metrics if recall is None else metrics | {"attention recall": recall}

    def export(self, folder: Path, dtype: str | torch.dtype, assets: Path | None) -> None:
        """Write a checkpoint in the published layout."""
        save(self.model, folder, dtype=dtype, max_shard_bytes=self.recipe.checkpoints.max_shard_bytes, assets=assets)

    def write_state(self, store: Store, position: Position) -> None:
        weights = self.model.state_dict() if self.masters is None else self.masters.state_dict(self.model)
        store.write(position, weights, self.step.optimizers.state_dict())

    def agree(self, *, stop: bool) -> bool:
        """Whether any process has a request to stop."""
        return stop

    def finish(self) -> None:
        """Wait for pending writes."""


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError(f"device {name}: there is no CUDA device here")
    return device


def batch_of(rows: Sequence[Row], device: torch.device) -> Batch:
    """Rows as one packed batch."""
    ids_T = torch.from_numpy(np.concatenate([row.ids for row in rows]))
    weight_T = torch.from_numpy(np.concatenate([row.weights for row in rows]))
    return Batch(ids_T, weight_T, [length for row in rows for length in row.lengths]).to(device)
