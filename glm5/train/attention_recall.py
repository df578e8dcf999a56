"""Attention recall: the share of dense attention that falls on the keys that the indexers select.

    recall = mean over queries, layers and heads of  sum over selected keys s of  attention[h, t, s]

It measures the quality of an indexer better than its KL loss. The forward pass uses dense attention. Queries with at
most as many keys as are selected do not count. Above 0.95 a model can switch to sparse attention (training notes, 3.3).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.kernels.attention_target import head_mean_probs
from glm5.kernels.select_keys import select_keys
from glm5.kernels.sparse_mla import sparse_mla
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.model.seams import Selection
from glm5.train.batch import Batch


class RecallView(PackedView):
    """A view of dense attention that sums the attention on selected keys in `kept`, for `counted` queries."""

    @property
    def reads_all(self) -> bool:
        return False

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu") -> None:
        super().__init__(lengths, device, stage="dense")
        self.kept = self.counted = 0.0

    def select(self, layer_idx: int, q_TJI: Tensor, w_TJ: Tensor, top_k: int, scale: float) -> Selection:
        where = (self.page_table_BN, self.row_T, self.end_T)
        self._keys_TK = select_keys(q_TJI, self._index_key_PZI, w_TJ, *where, top_k=top_k, scale=scale)
        self._counts_T = self.end_T > top_k
        return Selection(None)

    def attend_expanded(self, *_args: object, **_kwargs: object) -> None:
        """None: `attend` needs the latents."""

    def attend(self, layer_idx: int, q_THL: Tensor, selection: Selection, *, scale: float, value_dim: int) -> Tensor:
        where = (self.page_table_BN, self.row_T, self.end_T)
        out_THC, lse_TH = sparse_mla(q_THL, self._latent_PZL, None, *where, scale=scale, value_dim=value_dim)
        probs_TK = head_mean_probs(q_THL, self._latent_PZL, self._keys_TK, lse_TH, *where, scale=scale)
        self.kept += probs_TK.sum(dim=-1)[self._counts_T].sum().item()
        self.counted += self._counts_T.sum().item()
        return out_THC


@torch.no_grad()
def attention_recall(model: Glm5, batches: Sequence[Batch]) -> float | None:
    """The recall of the trunk's layers on these batches; None where all queries see at most `index_topk` keys."""
    kept = counted = 0.0
    for batch in batches:
        view = RecallView(batch.lengths, batch.ids_T.device)
        model(batch.ids_T, view)
        kept, counted = kept + view.kept, counted + view.counted
    return kept / counted if counted else None
