"""Trains the stages of a run in this process. The loop uses this interface for distributed runs, too
(`parallel/trainer.py`)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from glm5.checkpoint.save import save
from glm5.common.atomic import atomic_write_json
from glm5.common.errors import TrainingError
from glm5.config.model import ModelConfig
from glm5.config.train import Recipe, StageConfig
from glm5.train.activation_memory import set_activation_memory
from glm5.train.attention_recall import attention_recall
from glm5.train.batch import Batch
from glm5.train.build import Builder
from glm5.train.data.sources import Row
from glm5.train.evaluate import byte_lengths, held_out
from glm5.train.master_weights import MasterWeights
from glm5.train.optim.build import Optimizers
from glm5.train.preference import (
    REFERENCE,
    BradleyTerry,
    PairObjective,
    answer_logprobs,
    held_out_pairs,
    objective_of,
)
from glm5.train.qat import set_fake_int4
from glm5.train.reference import Reference
from glm5.train.reward_model import FILE, Calibration
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
    pairs: PairObjective | None = None
    """What the current stage minimises on pairs, if its data are pairs."""
    reference: Reference | None = None
    calibration: Calibration | None = None
    """Of the rewards of the last evaluation."""

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
        self.step = self._step(optimizers, stage, phase_of(stage))
        return self.step

    def _step(self, optimizers: Optimizers, stage: StageConfig, phase: Phase) -> Step:
        losses = losses_of(self.recipe, stage, 0)
        self.pairs, self.reference, self.calibration = objective_of(stage, losses.chunk), None, None
        return Step(self.model, optimizers, losses, phase, self.masters, self.pairs)

    def prepare(self, stage: StageConfig, rows: Iterable[Row], num_rows: int, *, is_start: bool) -> None:
        """What a stage needs of all its rows before it trains: for DPO, log-probabilities under the reference, which
        is the model where `is_start`. Raises TrainingError where some are missing later."""
        if stage.kind != "dpo":
            return
        self.reference = Reference(self.builder.out / "data" / f"reference-{stage.name}.npz")
        size = stage.pass_sequences or stage.sequences
        self.reference.complete(rows, num_rows, self._logprobs if is_start else None, size)

    @torch.no_grad()
    def _logprobs(self, rows: Sequence[Row]) -> Tensor:
        """Of the answers of packed rows, [B]."""
        batch = batch_of(rows, self.device)
        hidden_TD = self.model(batch.ids_T, self.step.phase.view(batch))
        return answer_logprobs(self.model, hidden_TD, batch, self.step.cfg.chunk)

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
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        columns = [{} if self.reference is None else {REFERENCE: self.reference.column(part)} for part in parts]
        return [batch_of(part, self.device, of_part) for part, of_part in zip(parts, columns, strict=True)]

    def held_out(self, stage: StageConfig, rows: Sequence[Row], phase: Phase) -> dict[str, float]:
        """Metrics of held-out rows."""
        batches = self.batches(stage, rows)
        if self.pairs is None:
            metrics = held_out(self.model, batches, phase, self.byte_lengths)
        else:
            metrics = held_out_pairs(self.model, batches, phase, self.pairs)
        if "temperature" in metrics:
            num_pairs = int(metrics["held-out pairs"])
            self.calibration = Calibration(keys=phase.keys, temperature=metrics["temperature"], num_pairs=num_pairs)
        recall = attention_recall(self.model, batches) if phase.learn_index else None
        return metrics if recall is None else metrics | {"attention recall": recall}

    @cached_property
    def byte_lengths(self) -> Tensor | None:
        """`evaluate.byte_lengths`, where there is a tokenizer."""
        tokenizer = self.builder.tokenizer
        return None if tokenizer is None else byte_lengths(tokenizer, self.builder.cfg.vocab_size).to(self.device)

    def export(self, folder: Path, dtype: str | torch.dtype, assets: Path | None) -> None:
        """Write a checkpoint in the published layout."""
        save(self.model, folder, dtype=dtype, max_shard_bytes=self.recipe.checkpoints.max_shard_bytes, assets=assets)
        if isinstance(self.pairs, BradleyTerry):
            atomic_write_json(folder / FILE, (self.calibration or Calibration(keys=self.step.phase.keys)).model_dump())

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


def batch_of(rows: Sequence[Row], device: torch.device, columns: Mapping[str, Tensor] = MappingProxyType({})) -> Batch:
    """Rows as one packed batch, with these columns."""
    ids_T = torch.from_numpy(np.concatenate([row.ids for row in rows]))
    weight_T = torch.from_numpy(np.concatenate([row.weights for row in rows]))
    lengths = [length for row in rows for length in row.lengths]
    return Batch(ids_T, weight_T, lengths, columns=columns).to(device)
