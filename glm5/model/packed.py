"""Keys of whole sequences packed into one pass: training, and logits in one shot.

Every sequence is one page of the kernels' paged layout, as long as the longest. The view lives for one forward pass
and holds tensors with gradients; on request it also gathers what the indexer's loss needs.
"""

from typing import Literal

import torch
from torch import Tensor

from glm5.kernels.select_keys import select_keys
from glm5.kernels.sparse_mla import sparse_mla
from glm5.model.index_loss import IndexRecord, index_loss
from glm5.model.seams import Selection

Stage = Literal["dense", "warmup", "sparse"]


class PackedView:
    """A `KVView` over sequences of the given lengths, each starting at position 0.

    stage: "sparse" attends to the indexer's selection; "dense" and "warmup" attend to every earlier key.
    learn_index: gather scores and attention for `index_loss` ("warmup": over all keys, "sparse": over the selected).
    """

    def __init__(
        self,
        lengths: list[int],
        device: torch.device | str = "cpu",
        *,
        stage: Stage = "sparse",
        learn_index: bool = False,
    ):
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed batch needs sequences of at least one token, got {lengths=}")
        self.stage, self.learn_index = stage, learn_index
        self.max_len, self.num_rows = max(lengths), len(lengths)
        lengths_B = torch.tensor(lengths, device=device)
        self.positions_T = torch.cat([torch.arange(n, device=device) for n in lengths])
        self.row_T = torch.repeat_interleave(torch.arange(self.num_rows, device=device), lengths_B).int()
        self.end_T = (self.positions_T + 1).int()
        self.page_table_BN = torch.arange(self.num_rows, device=device, dtype=torch.int32).unsqueeze(1)
        self._slot_T = None if min(lengths) == self.max_len else self.row_T * self.max_len + self.positions_T
        self._records: list[IndexRecord] = []

    def append_latent(self, layer_idx: int, latent_TL: Tensor) -> None:
        self._latent_PZL = self._paged(latent_TL)

    def append_index_key(self, layer_idx: int, key_TI: Tensor) -> None:
        self._index_key_PZI = self._paged(key_TI)

    def select(self, layer_idx: int, q_TJI: Tensor, w_TJ: Tensor, top_k: int, scale: float) -> Selection:
        sparse = self.stage == "sparse" and self.max_len > top_k
        where, keys_TK = (self.page_table_BN, self.row_T, self.end_T), None
        if sparse:
            pool_PZI = self._index_key_PZI.detach()
            keys_TK = select_keys(q_TJI.detach(), pool_PZI, w_TJ.detach(), *where, top_k=top_k, scale=scale)
        if self.learn_index:
            if self._records:
                self._records[-1].settle()
            self._records.append(IndexRecord(q_TJI, self._index_key_PZI, w_TJ, keys_TK, where, scale))
        return Selection(keys_TK)

    def attend(self, layer_idx: int, q_THL: Tensor, selection: Selection, *, scale: float, value_dim: int) -> Tensor:
        where = (self.page_table_BN, self.row_T, self.end_T)
        out_THC, lse_TH = sparse_mla(
            q_THL, self._latent_PZL, selection.keys_TK, *where, scale=scale, value_dim=value_dim
        )
        if self.learn_index:
            self._records[-1].add((q_THL.detach(), self._latent_PZL.detach(), lse_TH.detach()), scale)
        return out_THC

    def on_host(self, layer_idx: int) -> None:
        """Not in native code: gradients may be asked for."""

    def index_loss(self) -> Tensor:
        """Mean KL over indexers and queries of this pass (index_loss.py); a view with `learn_index` only."""
        return index_loss(self._records)

    def _paged(self, rows_TX: Tensor) -> Tensor:
        if self._slot_T is None:
            return rows_TX.unflatten(0, (self.num_rows, self.max_len))
        padded = rows_TX.new_zeros(self.num_rows * self.max_len, rows_TX.shape[-1])
        return padded.index_copy(0, self._slot_T, rows_TX).unflatten(0, (self.num_rows, self.max_len))
