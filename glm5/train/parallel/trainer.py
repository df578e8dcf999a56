"""What a run of several processes trains: this rank's part of the model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.stream import save_stream
from glm5.config.model import ModelConfig
from glm5.config.train import Recipe, StageConfig
from glm5.model.packed import PackedView
from glm5.train.attention_recall import RecallView
from glm5.train.batch import Batch
from glm5.train.build import Builder
from glm5.train.data.sources import Row
from glm5.train.evaluate import count, means
from glm5.train.optim.build import Optimizers
from glm5.train.parallel.build import ModelShard, build, fill, outline
from glm5.train.parallel.context import CutBatch
from glm5.train.parallel.gather import spread, whole_tensors
from glm5.train.parallel.mesh import check_stage
from glm5.train.parallel.pipeline import PipelineStep, Stage
from glm5.train.parallel.state_writer import StateWriter
from glm5.train.parallel.step import SharedStep, shards_of
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.qat import make_aware
from glm5.train.sharded_state import buffers, read_parts, state_rows, weight_rows
from glm5.train.stage_trainer import StageTrainer, batch_of
from glm5.train.stages import choose_parameters, losses_of, phase_of
from glm5.train.state import Position, Store
from glm5.train.step import Phase


class SharedTrainer(StageTrainer):
    """`StageTrainer` of one rank of a team."""

    shared: SharedStep
    """`step`, as what it is here."""

    def __init__(self, team: TrainingGroup, recipe: Recipe, builder: Builder, saved: Mapping[str, Any] | None) -> None:
        self.recipe, self.builder, self.team = recipe, builder, team
        self.device, self.is_first = team.device, team.is_first
        self.parts = None if saved is None else read_parts(saved, builder.out, team.rank, team.mesh.size)
        self.part: ModelShard | None = None
        timeout_s = recipe.parallel.timeout_s
        self.writer = StateWriter(team.rank, team.mesh.size, team.run, timeout_s=timeout_s)
        for stage in recipe.stage:
            check_stage(team.mesh, builder.cfg, stage)

    def begin(self, stage: StageConfig, cfg: ModelConfig, before: Optimizers | None) -> SharedStep:
        recipe, team = self.recipe, self.team
        part = self._made(stage, cfg)
        self._fill(part)
        optimizers = Optimizers(part.local, cfg, stage.optimizer or recipe.optimizer, shards_of(part.places, team))
        if self.parts is not None:
            optimizers.load_state_dict(self._states(part, optimizers))
            self.parts = None
        elif stage.keep_optimizer and before is not None:
            optimizers.load_state_dict(before.state_dict())
        self.part, losses, phase = part, losses_of(recipe, stage, 0), self._phase(stage)
        if team.mesh.pipeline == 1:
            self.shared = SharedStep(part.roots[0], team, optimizers, losses, phase)
        else:
            self.shared = PipelineStep(part, team, optimizers, losses, phase, tokens=self._most_tokens(stage))
        self.step = self.shared
        return self.shared

    def share(self, draws: range) -> range:
        mine = self.team.mesh.rows(len(draws), self.team.rank)
        return draws[mine.start : mine.stop]

    def tokens(self, count: int) -> int:
        mesh = self.team.mesh
        return int(self.team.total(torch.tensor(count), self.team.stage).item()) // mesh.context

    def batches(self, stage: StageConfig, rows: Sequence[Row]) -> list[Batch]:
        size = stage.pass_sequences or max(1, len(rows))
        whole = [batch_of(rows[at : at + size], self.device) for at in range(0, len(rows), size)]
        mesh = self.team.mesh
        if mesh.context == 1:
            return whole
        return [CutBatch(batch, mesh.part(self.team.rank), mesh.context) for batch in whole]

    @torch.no_grad()
    def held_out(self, stage: StageConfig, rows: Sequence[Row], phase: Phase) -> dict[str, float]:
        """Whole rows are dealt out, to those who share contexts too; who has none left runs one that does not count."""
        mesh, mine = self.team.mesh, self.team.mesh.shard(self.team.rank)
        counted, recall = torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        self._share_copies()
        for first in range(0, len(rows), mesh.shards):
            counts = first + mine < len(rows)
            batch = batch_of([rows[first + mine if counts else first]], self.device)
            found = self._behind_layers(batch, phase.view(batch), self._count_of(batch))
            if counts and found is not None:
                counted += found
            if phase.learn_index:
                view = RecallView(batch.lengths, self.device)
                self._behind_layers(batch, view, lambda _: None)
                recall += torch.tensor([view.kept, view.counted]) if counts else 0.0
        figures = means(self.team.total(counted))
        kept, total = self.team.total(recall).tolist()
        return figures | {"attention recall": kept / total} if total else figures

    def export(self, folder: Path, dtype: str | torch.dtype, assets: Path | None) -> None:
        tensors = whole_tensors(self._have, self.team)
        if self.is_first:
            cfg, held = self.shared.model.cfg, self._have.dtype
            limit = self.recipe.checkpoints.max_shard_bytes
            save_stream(tensors, cfg, folder, held=held, dtype=dtype, max_shard_bytes=limit, assets=assets)
        else:
            surplus = next(tensors, None)  # takes part until all are sent
            assert surplus is None, f"{surplus=}"

    def write_state(self, store: Store, position: Position) -> None:
        self.writer.write(store, position, self._have, self.shared.optimizers)

    def agree(self, *, stop: bool) -> bool:
        return self.team.any(stop)

    def finish(self) -> None:
        self.writer.finish()
        self.team.wait()

    @property
    def _have(self) -> ModelShard:
        assert self.part is not None, "before a stage began"
        return self.part

    def _phase(self, stage: StageConfig) -> Phase:
        return phase_of(stage)

    def _made(self, stage: StageConfig, cfg: ModelConfig) -> ModelShard:
        """This rank's part of the model, with whatever content."""
        recipe = self.recipe
        dtype = getattr(torch, recipe.model.dtype)
        compute = getattr(torch, recipe.model.compute or recipe.model.dtype)
        model = outline(cfg, dtype)
        choose_parameters(model, stage)
        make_aware(model, aware=stage.qat is not None)
        return build(model, self.team, recipe.parallel, dtype=dtype, compute=compute, mtp_depth=self._mtp_depth)

    @property
    def _mtp_depth(self) -> int:
        """The same for all stages of the recipe: so each rank keeps its rows from one to the next."""
        return max((one.losses or self.recipe.losses).mtp_depth for one in self.recipe.stage)

    def _fill(self, part: ModelShard) -> None:
        """With the rows of the stage before, or of the state that the run goes on from, or of the start."""
        rank, parts, old = self.team.rank, self.parts, self.part
        if parts is not None:
            biases = buffers(parts)
            fill(part, rank, lambda name, spans: weight_rows(parts, name, spans), biases.__getitem__)
        elif old is not None:
            fill(part, rank, lambda name, _: old.local[name].detach(), old.buffers.__getitem__)
        else:
            spread(part, self.team, self.builder.model(torch.device("cpu")).state_dict() if self.is_first else None)

    def _states(self, part: ModelShard, optimizers: Optimizers) -> dict[str, dict[str, Tensor]]:
        """This rank's rows of the saved state of each trained parameter."""
        assert self.parts is not None
        return {
            name: {
                key: one.view(part.local[name].shape) if one.dim() else one
                for key, one in state_rows(self.parts, name, part.places.spans(name, self.team.rank)).items()
            }
            for name in optimizers.named
        }

    def _most_tokens(self, stage: StageConfig) -> int:
        """That a pass can have on this rank."""
        mesh = self.team.mesh
        whole = (stage.pass_sequences or -(-stage.sequences // mesh.data)) * stage.seq_len
        return whole if mesh.context == 1 else 2 * -(-whole // (2 * mesh.context))

    def _count_of(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        return lambda hidden_TD: count(self.shared.model, hidden_TD, batch)

    def _behind_layers(self, batch: Batch, view: Any, work: Callable[[Tensor], Any]) -> Any:
        """`work` on the model's hidden states of a pass without gradients; None where another stage has them."""
        step, model = self.shared, self.shared.model
        if not isinstance(step, PipelineStep):
            return step.root(lambda: work(model(batch.ids_T, view)))

        def at_the_end(stage: Stage, x_TD: Tensor, _view: PackedView) -> Any:
            return work(model.model.norm(x_TD)) if stage.number == step.num_stages - 1 else None

        return step.relay(batch, at_the_end, lambda: view)[-1]

    def _share_copies(self) -> None:
        if isinstance(self.shared, PipelineStep):
            self.shared.share_embedding()
