"""Context parallelism: each rank has the queries of some tokens of a pass, and the latents of all.

    tokens are cut into 2n pieces; rank c of n has pieces c and 2n - 1 - c, so that early and late queries balance
    latents and index keys are all-gathered once a layer (576 + 128 values a token), gradients are reduce-scattered

Each rank selects keys of all tokens for its own queries, so attention, selection and the indexers' loss are the same
as on one device, row by row (training notes, 6).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch import distributed as dist

from glm5.model.packed import PackedView, Stage
from glm5.train.batch import Batch, Targets
from glm5.train.parallel.collectives import Group, gather_rows


def token_indices(num_tokens: int, part: int, parts: int) -> Tensor:
    """Indices of the tokens of a part, ascending, int64."""
    pieces = torch.arange(num_tokens).tensor_split(2 * parts)
    return torch.cat([pieces[part], pieces[2 * parts - 1 - part]])


class BatchShard(Batch):
    """The tokens `token_T` of a batch. Positions index these tokens; sequences and targets are those of `whole`."""

    def __init__(self, whole: Batch, part: int, parts: int) -> None:
        """ValueError where there are fewer tokens than pieces."""
        num = len(whole.ids_T)
        if num < 2 * parts:
            raise ValueError(f"a pass of {num} tokens cannot be shared by {parts} ranks: give each at least two")
        token_T = token_indices(num, part, parts).to(whole.ids_T.device)
        index_T = torch.full_like(whole.ids_T, -1)
        index_T[token_T] = torch.arange(len(token_T), device=index_T.device)
        fields = {"ids_T": whole.ids_T[token_T], "weight_T": whole.weight_T[token_T], "lengths": whole.lengths}
        # Bypasses the frozen dataclass and its check, because `lengths` are those of the full batch.
        of_whole = {"whole": whole, "columns": whole.columns, "kept": whole.kept}
        vars(self).update(fields | of_whole | {"on_host": None, "token_T": token_T, "index_T": index_T})

    whole: Batch
    token_T: Tensor
    index_T: Tensor
    """For each token of `whole` its index in this shard, or -1."""

    def targets(self, distance: int) -> tuple[Tensor, Tensor, Tensor]:
        position_G, target_G, weight_G = self.whole.targets(distance)
        index_G = self.index_T[position_G]
        is_local_G = index_G >= 0
        return index_G[is_local_G], target_G[is_local_G], weight_G[is_local_G]

    def targets_of(self, names: Sequence[str]) -> Targets:
        of_whole = self.whole.targets_of(names)
        index_G = self.index_T[of_whole.position_G]
        local = of_whole.take((index_G >= 0).nonzero()[:, 0])
        return replace(local, position_G=self.index_T[local.position_G])

    def weight_of_targets(self, distance: int) -> float:
        return self.targets(distance)[2].sum().item()

    def ids_after(self, distance: int) -> Tensor:
        return self.whole.ids_after(distance)[self.token_T]


class ContextView(PackedView):
    """The queries of one rank, over the keys of all ranks of the group."""

    whole = False

    def __init__(self, batch: BatchShard, group: Group, *, stage: Stage, learn_index: bool) -> None:
        device = batch.ids_T.device
        super().__init__(batch.lengths, device, stage=stage, learn_index=learn_index)
        num, parts = len(self.positions_T), dist.get_world_size(group)
        pieces = [token_indices(num, part, parts) for part in range(parts)]
        self._group, self._sizes = group, [len(piece) for piece in pieces]
        self._order_T = torch.cat(pieces).argsort().to(device)
        self.positions_T = self.positions_T[batch.token_T]
        self.row_T, self.end_T = self.row_T[batch.token_T], self.end_T[batch.token_T]

    def _paged(self, rows_TX: Tensor) -> Tensor:
        return super()._paged(gather_rows(rows_TX, self._sizes, self._group)[self._order_T])
