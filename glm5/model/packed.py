"""Keys of whole sequences packed into one pass: training, and logits in one shot.

Every sequence is one page of the kernels' paged layout, as long as the longest: on a GPU, whose kernels are compiled
for a page size, the next power of two. The view lives for one forward pass and holds tensors with gradients; on request
it also gathers what the indexer's loss needs.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.select_keys import select_keys
from glm5.kernels.sequence_attention import fits, sequence_attention
from glm5.kernels.sparse_mla import sparse_mla
from glm5.model.attention import absorbed
from glm5.model.index_loss import IndexRecord, index_loss
from glm5.model.seams import Selection, again

Stage = Literal["dense", "warmup", "sparse"]


class PackedView:
    """A `KVView` over sequences of the given lengths, each starting at position 0.

    stage: "sparse" attends to the indexer's selection; "dense" and "warmup" attend to every earlier key.
    learn_index: gather scores and attention for `index_loss` ("warmup": over all keys, "sparse": over the selected).
    """

    whole = True
    """Whether the queries are all tokens of their sequences, in order, and the keys no others."""

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
        self.lengths = lengths
        length_B = torch.tensor(lengths)  # on the host: nothing here waits for a GPU
        position_T = torch.arange(sum(lengths)) - torch.repeat_interleave(length_B.cumsum(0) - length_B, length_B)
        self.positions_T = _moved(position_T, device)
        row_T = torch.repeat_interleave(torch.arange(self.num_rows, dtype=torch.int32), length_B)
        self.row_T = _moved(row_T, device)
        self.end_T = (self.positions_T + 1).int()
        self.page_table_BN = torch.arange(self.num_rows, device=device, dtype=torch.int32).unsqueeze(1)
        self._page_size, self._slot_T = self.max_len, None
        if min(lengths) < self.max_len:
            if torch.device(device).type == "cuda":
                self._page_size = 1 << (self.max_len - 1).bit_length()
            self._slot_T = self.row_T * self._page_size + self.positions_T
        self._records: list[IndexRecord] = []

    def append_latent(self, layer_idx: int, latent_TL: Tensor) -> None:
        self._latent_TL = latent_TL
        self._latent_PZL = self._paged(latent_TL)

    def append_index_key(self, layer_idx: int, key_TI: Tensor) -> None:
        self._index_key_PZI = self._paged(key_TI)

    @property
    def reads_all(self) -> bool:
        return self.stage != "sparse" and not self.learn_index

    def select(self, layer_idx: int, q_TJI: Tensor, w_TJ: Tensor, top_k: int, scale: float) -> Selection:
        sparse = self.stage == "sparse" and self.max_len > top_k
        where, keys_TK = (self.page_table_BN, self.row_T, self.end_T), None
        if sparse:
            pool_PZI = self._index_key_PZI.detach()
            keys_TK = select_keys(q_TJI.detach(), pool_PZI, w_TJ.detach(), *where, top_k=top_k, scale=scale)
        if self.learn_index:
            if self._records:
                self._records[-1].settle()
            self._records.append(IndexRecord(q_TJI, self._index_key_PZI, w_TJ, keys_TK, where, scale, self.whole))
        return Selection(keys_TK)

    def attend(self, layer_idx: int, q_THL: Tensor, selection: Selection, *, scale: float, value_dim: int) -> Tensor:
        where = (self.page_table_BN, self.row_T, self.end_T)
        out_THC, lse_TH = sparse_mla(
            q_THL, self._latent_PZL, selection.keys_TK, *where, scale=scale, value_dim=value_dim
        )
        if self.learn_index and not again():
            self._records[-1].add((q_THL.detach(), self._latent_PZL.detach(), lse_TH.detach()), scale)
        return out_THC

    def attend_expanded(
        self, layer_idx: int, q_THX: Tensor, w_k_HNC: Tensor, w_v_HVC: Tensor, selection: Selection, *, scale: float
    ) -> Tensor | None:
        """On a GPU, where every visible key is read: less than half the operations of absorbed queries."""
        if not self.whole or selection.keys_TK is not None or not fits(q_THX, w_v_HVC.shape[1]):
            return None
        value_TC, rope_TR = self._latent_TL[:, : w_k_HNC.shape[2]], self._latent_TL[:, w_k_HNC.shape[2] :]
        num_tokens, num_heads, _ = q_THX.shape
        key_THN = F.linear(value_TC, w_k_HNC.flatten(0, 1)).view(num_tokens, num_heads, -1)
        value_THV = F.linear(value_TC, w_v_HVC.flatten(0, 1)).view(num_tokens, num_heads, -1)
        key_THX = torch.cat([key_THN, rope_TR.unsqueeze(1).expand(-1, num_heads, -1)], dim=-1)
        out_THV, lse_TH = sequence_attention(q_THX, key_THX, value_THV, self.lengths, scale=scale)
        if self.learn_index and not again():
            with torch.no_grad():
                self._records[-1].add((absorbed(q_THX, w_k_HNC), self._latent_PZL.detach(), lse_TH.detach()), scale)
        return out_THV

    def index_loss(self) -> Tensor:
        """Mean KL over indexers and queries of this pass (index_loss.py); a view with `learn_index` only."""
        return index_loss(self._records)

    def _paged(self, rows_TX: Tensor) -> Tensor:
        if self._slot_T is None:
            return rows_TX.unflatten(0, (self.num_rows, self._page_size))
        padded = rows_TX.new_zeros(self.num_rows * self._page_size, rows_TX.shape[-1])
        return padded.index_copy(0, self._slot_T, rows_TX).unflatten(0, (self.num_rows, self._page_size))


def _moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Through pinned memory where copying from any other would wait for what a GPU does."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
