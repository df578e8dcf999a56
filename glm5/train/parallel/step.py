"""A distributed training step: `Step` with reductions over ranks.

each rank     passes over its rows (and its tokens of them), with losses divided by the totals of all ranks
FSDP          sums gradients
all ranks     losses, norms and expert loads are all-reduced, so that all ranks decide alike
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.config.step import LossConfig
from glm5.model.packed import PackedView
from glm5.train.batch import Batch
from glm5.train.objective import Objective
from glm5.train.optim.build import Optimizers, Shards
from glm5.train.parallel.collectives import swap
from glm5.train.parallel.context import BatchShard, ContextView
from glm5.train.parallel.row_layout import RowLayout
from glm5.train.parallel.shards import Root, local_parameters, take_gradients
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.step import Phase, Result, Step, first_not_finite


class DistributedStep(Step):
    """`root` holds this rank's shards; `optimizers` update the rows that `local_parameters` returns."""

    def __init__(
        self,
        root: Root,
        team: TrainingGroup,
        optimizers: Optimizers,
        cfg: LossConfig,
        phase: Phase,
        objective: Objective | None = None,
    ) -> None:
        super().__init__(root.glm, optimizers, cfg, phase, objective=objective)
        self.root, self.team = root, team
        self._sum_context_counts()

    def _sum_context_counts(self) -> None:
        """Sum expert counts over ranks that share sequences."""
        if self.team.mesh.context > 1:
            self.balance.total = lambda counts: self.team.total(counts, self.team.context)

    def _sum_over_ranks(self, totals: dict[str, float]) -> dict[str, float]:
        sums = self.team.total(torch.tensor(list(totals.values()), dtype=torch.float64), self.team.stage)
        return dict(zip(totals, sums.tolist(), strict=True))

    def _gradients(self, batches: Sequence[Batch], totals: Mapping[str, float]) -> dict[str, Tensor]:
        losses = self._local_gradients(batches, totals)
        self._take_gradients()
        for name, load_E in self.balance.loads.items():
            self.balance.loads[name] = self.team.total(load_E, self.team.stage)
        return self._sum_over_all_ranks(losses)

    def _not_finite(self) -> str | None:
        found: list[str | None] = [None] * self.team.mesh.size
        dist.all_gather_object(found, first_not_finite(local_parameters(self.model).items()))
        return next((name for name in found if name is not None), None)

    def _local_gradients(self, batches: Sequence[Batch], totals: Mapping[str, float]) -> dict[str, Tensor]:
        """This rank's part of the losses; gradients are added to the shards."""
        return super()._gradients(batches, totals)

    def _take_gradients(self) -> None:
        """Move gradients from the shards to the optimizers' parameters."""
        take_gradients(self.model, self.optimizers.named)

    def _sum_over_all_ranks(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over all ranks of the losses that any rank has; `factors` fixes their order in the all-reduce."""
        names = list(self.factors)
        sums = torch.zeros(2, len(names), dtype=torch.float64, device=self.team.device)
        for i, name in enumerate(names):
            if name in losses:
                sums[:, i] = torch.stack([losses[name].double(), sums.new_ones(())])
        values, counts = self.team.total(sums)
        return {name: value for name, value, count in zip(names, values, counts.tolist(), strict=True) if count}

    def _pass(
        self, batch: Batch, view: PackedView, totals: Mapping[str, float]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        return self.root(super()._pass, batch, view, totals)

    def on_hidden_states(self, batch: Batch, view: PackedView, work: Callable[[Tensor], Result]) -> Result | None:
        return self.root(lambda: work(self.model(batch.ids_T, view)))

    def _view(self, batch: Batch) -> PackedView:
        if not isinstance(batch, BatchShard):
            return super()._view(batch)
        return ContextView(batch, self.team.context, stage=self.phase.keys, learn_index=self.phase.learn_index)


def shards_of(layout: RowLayout, team: TrainingGroup) -> Shards:
    """The sharding information that `Optimizers` needs."""
    ranks = team.mesh.stage_ranks(team.rank)
    return Shards(
        shapes=layout.shapes,
        spans=lambda name: [layout.spans(name, rank) for rank in ranks],
        rank=team.mesh.shard(team.rank),
        size=len(ranks),
        swap=lambda parts: swap(parts, team.stage),
        total=team.total,
    )
