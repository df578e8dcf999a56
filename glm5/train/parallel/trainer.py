"""Trains the stages of a distributed run: this rank's part."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.stream import save_stream
from glm5.config.model import ModelConfig
from glm5.config.train import Recipe, StageConfig
from glm5.train.attention_recall import RecallView
from glm5.train.batch import Batch
from glm5.train.build import Builder
from glm5.train.data.sources import Row
from glm5.train.evaluate import COUNTS, count, means
from glm5.train.optim.build import Optimizers
from glm5.train.parallel.build import ModelShard, build, fill, outline
from glm5.train.parallel.context import BatchShard
from glm5.train.parallel.gather import gather_tensors, scatter_tensors
from glm5.train.parallel.mesh import check_stage
from glm5.train.parallel.pipeline import PipelineStep
from glm5.train.parallel.state_writer import StateWriter
from glm5.train.parallel.step import DistributedStep, shards_of
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.qat import set_fake_int4
from glm5.train.sharded_state import buffers, read_parts, state_rows, weight_rows
from glm5.train.stage_trainer import StageTrainer, batch_of
from glm5.train.stages import choose_parameters, losses_of, phase_of
from glm5.train.state import Position, Store
from glm5.train.step import Phase


class DistributedTrainer(StageTrainer):
    """`StageTrainer` for one rank of a distributed run."""

    def __init__(self, team: TrainingGroup, recipe: Recipe, builder: Builder, saved: Mapping[str, Any] | None) -> None:
        self.recipe, self.builder, self.team = recipe, builder, team
        self.device, self.is_first = team.device, team.is_first
        self.parts = None if saved is None else read_parts(saved, builder.out, team.rank, team.mesh.size)
        self.part: ModelShard | None = None
        timeout_s = recipe.parallel.timeout_s
        self.writer = StateWriter(team.rank, team.mesh.size, team.run, timeout_s=timeout_s)
        for stage in recipe.stage:
            check_stage(team.mesh, builder.cfg, stage)

    def begin(self, stage: StageConfig, cfg: ModelConfig, before: Optimizers | None) -> DistributedStep:
        recipe, team = self.recipe, self.team
        part = self._build(stage, cfg)
        self._fill(part)
        optimizers = Optimizers(part.local, cfg, stage.optimizer or recipe.optimizer, shards_of(part.layout, team))
        if self.parts is not None:
            optimizers.load_state_dict(self._states(part, optimizers))
            self.parts = None
        elif stage.keep_optimizer and before is not None:
            optimizers.load_state_dict(before.state_dict())
        self.part, losses, phase = part, losses_of(recipe, stage, 0), self._phase(stage)
        if team.mesh.pipeline == 1:
            step = DistributedStep(part.roots[0], team, optimizers, losses, phase)
        else:
            step = PipelineStep(part, team, optimizers, losses, phase, tokens=self._most_tokens(stage))
        self.step = step
        return step

    def share(self, draws: range) -> range:
        own = self.team.mesh.rows(len(draws), self.team.rank)
        return draws[own.start : own.stop]

    def tokens(self, count: int) -> int:
        mesh = self.team.mesh
        return int(self.team.total(torch.tensor(count), self.team.stage).item()) // mesh.context

    def batches(self, stage: StageConfig, rows: Sequence[Row]) -> list[Batch]:
        size = stage.pass_sequences or max(1, len(rows))
        whole = [batch_of(rows[at : at + size], self.device) for at in range(0, len(rows), size)]
        mesh = self.team.mesh
        if mesh.context == 1:
            return whole
        return [BatchShard(batch, mesh.part(self.team.rank), mesh.context) for batch in whole]

    @torch.no_grad()
    def held_out(self, stage: StageConfig, rows: Sequence[Row], phase: Phase) -> dict[str, float]:
        """Metrics of held-out rows, distributed over all shards. A rank without a row left runs another one that does
        not count, because all ranks must take part."""
        mesh, own = self.team.mesh, self.team.mesh.shard(self.team.rank)
        counted, recall = torch.zeros(COUNTS, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        self._sync_embedding()
        for first in range(0, len(rows), mesh.shards):
            counts = first + own < len(rows)
            batch = batch_of([rows[first + own if counts else first]], self.device)
            found = self.step.on_hidden_states(batch, phase.view(batch), self._counter(batch))
            if counts and found is not None:
                counted += found
            if phase.learn_index:
                view = RecallView(batch.lengths, self.device)
                self.step.on_hidden_states(batch, view, lambda _: None)
                recall += torch.tensor([view.kept, view.counted]) if counts else 0.0
        metrics = means(self.team.total(counted))
        kept, total = self.team.total(recall).tolist()
        return metrics | {"attention recall": kept / total} if total else metrics

    def export(self, folder: Path, dtype: str | torch.dtype, assets: Path | None) -> None:
        tensors = gather_tensors(self._shard, self.team)
        if self.is_first:
            cfg, held = self.step.model.cfg, self._shard.dtype
            limit = self.recipe.checkpoints.max_shard_bytes
            save_stream(tensors, cfg, folder, held=held, dtype=dtype, max_shard_bytes=limit, assets=assets)
        else:
            surplus = next(tensors, None)  # runs until all tensors are sent
            assert surplus is None, f"{surplus=}"

    def write_state(self, store: Store, position: Position) -> None:
        self.writer.write(store, position, self._shard, self.step.optimizers)

    def agree(self, *, stop: bool) -> bool:
        return self.team.any(stop)

    def finish(self) -> None:
        self.writer.finish()
        self.team.wait()

    @property
    def _shard(self) -> ModelShard:
        assert self.part is not None, "before a stage began"
        return self.part

    def _phase(self, stage: StageConfig) -> Phase:
        return phase_of(stage)

    def _build(self, stage: StageConfig, cfg: ModelConfig) -> ModelShard:
        """This rank's part of the model, uninitialised."""
        recipe = self.recipe
        dtype = getattr(torch, recipe.model.dtype)
        compute = getattr(torch, recipe.model.compute or recipe.model.dtype)
        model = outline(cfg, dtype)
        choose_parameters(model, stage)
        set_fake_int4(model, aware=stage.qat is not None)
        return build(model, self.team, recipe.parallel, dtype=dtype, compute=compute, mtp_depth=self._mtp_depth)

    @property
    def _mtp_depth(self) -> int:
        """The maximum over all stages of the recipe, so that the layout is the same in all stages."""
        return max((stage.losses or self.recipe.losses).mtp_depth for stage in self.recipe.stage)

    def _fill(self, part: ModelShard) -> None:
        """Fill with the rows of the resumed state, of the previous stage, or of the initial model."""
        rank, parts, old = self.team.rank, self.parts, self.part
        if parts is not None:
            biases = buffers(parts)
            fill(part, rank, lambda name, spans: weight_rows(parts, name, spans), biases.__getitem__)
        elif old is not None:
            fill(part, rank, lambda name, _: old.local[name].detach(), old.buffers.__getitem__)
        else:
            start = self.builder.model(torch.device("cpu")).state_dict() if self.is_first else None
            scatter_tensors(part, self.team, start)

    def _states(self, part: ModelShard, optimizers: Optimizers) -> dict[str, dict[str, Tensor]]:
        """This rank's rows of the saved state of each trained parameter."""
        assert self.parts is not None
        return {
            name: {
                key: value.view(part.local[name].shape) if value.dim() else value
                for key, value in state_rows(self.parts, name, part.layout.spans(name, self.team.rank)).items()
            }
            for name in optimizers.named
        }

    def _most_tokens(self, stage: StageConfig) -> int:
        """The maximal number of tokens of a pass on this rank."""
        mesh = self.team.mesh
        whole = (stage.pass_sequences or -(-stage.sequences // mesh.data)) * stage.seq_len
        return whole if mesh.context == 1 else 2 * -(-whole // (2 * mesh.context))

    def _counter(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        return lambda hidden_TD: count(self.step.model, hidden_TD, batch, self.byte_lengths)

    def _sync_embedding(self) -> None:
        if isinstance(self.step, PipelineStep):
            self.step.share_embedding()
