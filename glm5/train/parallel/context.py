"""Context parallelism: ranks share the tokens of a pass. A rank has the queries of some, and the latents of all.

    tokens are cut into 2n pieces; rank c of n has the pieces c and 2n - 1 - c, so early and late queries balance
    latents and index keys are gathered once a layer (576 + 128 numbers a token), gradients come back as sums

Each rank selects keys for its own queries from all, so attention, selection and the indexers' loss are those of one
device, row by row (training notes, 6).
"""

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


class CutBatch(Batch):
    """The tokens `mine_T` of a batch; positions are among these, sequences and targets those of the whole one."""

    def __init__(self, whole: Batch, part: int, parts: int) -> None:
        """ValueError where there are fewer tokens than pieces."""
        num = len(whole.ids_T)
        if num < 2 * parts:
            raise ValueError(f"a pass of {num} tokens cannot be shared by {parts} ranks: give each at least two")
        mine_T = part_of(num, part, parts).to(whole.ids_T.device)
        place_T = torch.full_like(whole.ids_T, -1)
        place_T[mine_T] = torch.arange(len(mine_T), device=place_T.device)
        mine = {"ids_T": whole.ids_T[mine_T], "weight_T": whole.weight_T[mine_T], "lengths": whole.lengths}
        # What a batch has, though its lengths are those of more tokens; frozen, so not by assignment.
        vars(self).update(mine | {"on_host": None, "whole": whole, "mine_T": mine_T, "place_T": place_T})

    whole: Batch
    mine_T: Tensor
    place_T: Tensor
    """Of each token of the whole batch, where it lies here, or -1."""

    def targets(self, distance: int) -> tuple[Tensor, Tensor, Tensor]:
        position_G, target_G, weight_G = self.whole.targets(distance)
        place_G = self.place_T[position_G]
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
