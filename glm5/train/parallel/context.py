"""Context parallelism: ranks share the tokens of a pass. A rank has the queries of some, and the latents of all.

    tokens are cut into 2n pieces; rank c of n has the pieces c and 2n - 1 - c, so early and late queries balance
    latents and index keys are gathered once a layer (576 + 128 numbers a token), gradients come back as sums

Each rank selects keys for its own queries from all, so attention, selection and the indexers' loss are those of one
device, row by row (training notes, 6).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch import distributed as dist

from glm5.model.packed import PackedView, Stage
from glm5.train.batch import Batch
from glm5.train.parallel.collectives import Group, gather_rows


def part_of(num_tokens: int, part: int, parts: int) -> Tensor:
    """Which of `num_tokens` tokens the part has, ascending, int64."""
    pieces = torch.arange(num_tokens).tensor_split(2 * parts)
    return torch.cat([pieces[part], pieces[2 * parts - 1 - part]])


@dataclass(frozen=True)
class CutBatch(Batch):
    """The tokens `mine_T` of a batch; positions are among these, sequences and targets those of the whole one."""

    whole: Batch | None = None
    mine_T: Tensor | None = None

    @classmethod
    def of(cls, whole: Batch, part: int, parts: int) -> "CutBatch":
        """ValueError where there are fewer tokens than pieces."""
        num = len(whole.ids_T)
        if num < 2 * parts:
            raise ValueError(f"a pass of {num} tokens cannot be shared by {parts} ranks: give each at least two")
        mine_T = part_of(num, part, parts).to(whole.ids_T.device)
        return cls(whole.ids_T[mine_T], whole.weight_T[mine_T], whole.lengths, None, whole, mine_T)

    def __post_init__(self) -> None:
        assert self.whole is not None, "made by CutBatch.of"
        assert self.mine_T is not None, "made by CutBatch.of"

    @cached_property
    def _place_T(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Of each token of the whole batch, where it lies here, or -1."""
        place_T = torch.full_like(self.whole.ids_T, -1)
        place_T[self.mine_T] = torch.arange(len(self.mine_T), device=place_T.device)
        return place_T

    def targets(self, distance: int) -> tuple[Tensor, Tensor, Tensor]:
        position_G, target_G, weight_G = self.whole.targets(distance)
        place_G = self._place_T[position_G]
        mine_G = place_G >= 0
        return place_G[mine_G], target_G[mine_G], weight_G[mine_G]

    def weight_of_targets(self, distance: int) -> float:
        return self.targets(distance)[2].sum().item()

    def ids_after(self, distance: int) -> Tensor:
        return self.whole.ids_after(distance)[self.mine_T]


class ContextView(PackedView):
    """The queries of one rank, over the keys of all ranks of the group."""

    whole = False

    def __init__(self, batch: CutBatch, group: Group, *, stage: Stage, learn_index: bool) -> None:
        assert batch.mine_T is not None
        device = batch.ids_T.device
        super().__init__(batch.lengths, device, stage=stage, learn_index=learn_index)
        num, parts = len(self.positions_T), dist.get_world_size(group)
        pieces = [part_of(num, part, parts) for part in range(parts)]
        self._group, self._sizes = group, [len(piece) for piece in pieces]
        self._order_T = torch.cat(pieces).argsort().to(device)
        self.positions_T = self.positions_T[batch.mine_T]
        self.row_T, self.end_T = self.row_T[batch.mine_T], self.end_T[batch.mine_T]

    def _paged(self, rows_TX: Tensor) -> Tensor:
        return super()._paged(gather_rows(rows_TX, self._sizes, self._group)[self._order_T])
