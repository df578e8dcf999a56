"""The policy in training on several ranks: weights, gradients and optimizer state are sharded (FSDP2), and each rank
passes over its share of a step's sequences.

Every rank calls the same methods in the same order. The first one writes files, and has whole weights on the host when
they are asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.names import slot_of
from glm5.checkpoint.stream import save_stream
from glm5.common.atomic import atomic_write
from glm5.config.parallel import ParallelConfig
from glm5.config.rl import RLRecipe
from glm5.config.step import LossConfig
from glm5.config.tensors import tensor_specs
from glm5.rl.build import PolicyBuilder
from glm5.rl.state import RunState
from glm5.rl.trainer import Learnt, PolicyTrainer, Sequences
from glm5.rl.training.policy import SPARSE, choose_parameters
from glm5.train.optim.build import Optimizers
from glm5.train.parallel.build import build, fill, outline
from glm5.train.parallel.gather import gather_tensors, scatter_tensors
from glm5.train.parallel.state_writer import content_of
from glm5.train.parallel.step import DistributedStep, shards_of
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.sharded_state import buffers, full_state, read_parts, state_rows, weight_rows
from glm5.train.state import writing_to


class ShardedTrainer(PolicyTrainer):
    """`PolicyTrainer` for one rank of a group."""

    def __init__(self, recipe: RLRecipe, builder: PolicyBuilder, team: TrainingGroup) -> None:
        self.team, self.rank, self.num_ranks = team, team.rank, team.mesh.size
        self._start: Mapping[str, Tensor] | None = None
        self._whole: dict[str, Tensor] | None = None
        super().__init__(recipe, builder, team.device)

    def _build(self) -> None:
        recipe, dtype = self.recipe, getattr(torch, self.recipe.model.dtype)
        model = outline(self.builder.cfg, dtype)
        choose_parameters(model)
        self.part = part = build(model, self.team, ParallelConfig(), dtype=dtype, compute=self.compute, mtp_depth=0)
        shards = shards_of(part.layout, self.team)
        optimizers = Optimizers(part.local, self.builder.cfg, recipe.optimizer, shards)
        balance = {"balance_step": recipe.balance_step, "balance_weight": 0.0}
        losses = LossConfig(mtp_depth=0, chunk=self.objective.chunk, **balance)
        self.model = part.model
        self.step = DistributedStep(part.roots[0], self.team, optimizers, losses, SPARSE, self.objective)

    def warm_up(self) -> None:
        """By the first rank alone, which then has the weights to begin with."""
        if self.team.is_first:
            whole = PolicyTrainer(self.recipe, self.builder, self.device)
            whole.warm_up()
            self._start = whole.learnt()

    def begin(self) -> None:
        scatter_tensors(self.part, self.team, self._start)
        self._start = None
        super().begin()

    def learn(self, sequences: Sequences, parts: Sequence[Sequences], step: int) -> Learnt:
        self._whole = None
        return super().learn(sequences, parts, step)

    def learnt(self) -> dict[str, Tensor]:
        """Whole tensors on the first rank; none on the others."""
        if self._whole is None:
            self._whole = dict(gather_tensors(self.part, self.team))
        return self._whole

    def weights(self) -> dict[str, Tensor]:
        wide = {slot_of(spec.name).parameter for spec in tensor_specs(self.builder.cfg) if spec.dtype == "f32"}
        learnt = self.learnt()
        return {name: one if name in wide else one.to(self.compute) for name, one in learnt.items()}

    def save(self, state: RunState, step: int, ladders: Mapping[str, Any], rollouts: Mapping[str, Any] | None) -> None:
        """Ranks write their parts of the state into files, of which the first one makes the state."""
        learnt, cfg, assets = self.learnt(), self.builder.cfg, self.builder.assets
        names = [f".trainer-{rank}of{self.num_ranks}.00000000.part" for rank in range(self.num_ranks)]
        own = state.out / names[self.rank]
        with writing_to(own), atomic_write(own, "wb") as handle:
            torch.save(content_of(self.part, self.rank, self.step.optimizers), handle)
        self.team.wait()
        if self.team.is_first:
            held = getattr(torch, self.recipe.model.dtype)
            with writing_to(state.out):
                save_stream(learnt.items(), cfg, state.out / "policy", held=held, dtype=self.compute, assets=assets)
            whole = full_state({"parts": names}, state.out)
            state.write(step, ladders, {**whole, "reference": None, "critic": None}, rollouts)
        self.team.wait()
        own.unlink()

    def load_state(self, state: Mapping[str, Any]) -> None:
        part, rank, optimizers = self.part, self.rank, self.step.optimizers
        saved = read_parts({"model": state["model"], "optimizer": state["optimizer"]}, self.builder.out)
        fill(part, rank, lambda name, spans: weight_rows(saved, name, spans), buffers(saved).__getitem__)
        optimizers.load_state_dict(
            {
                name: {
                    key: value.view(part.local[name].shape) if value.dim() else value
                    for key, value in state_rows(saved, name, part.layout.spans(name, rank)).items()
                }
                for name in optimizers.named
            }
        )
