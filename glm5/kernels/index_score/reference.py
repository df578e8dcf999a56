"""Lightning-indexer score: how much query t wants to read key s (model spec 3.4).

    score[t, s] = sum_j w[t, j] * relu((q[t, j] . key[s]) * scale)       for s < end[t], else -inf

relu comes before the sum over heads, and w is signed. This file is the definition.
"""

import torch
from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.paging import query_runs, request_keys


def index_score(
    q_TJI: Tensor, key_PZI: Pool, w_TJ: Tensor, page_table_BN: Tensor, row_T: Tensor, end_T: Tensor, *, scale: float
) -> Tensor:
    """Scores [T, S] in float32 (float64 for float64 queries). One request at a time."""
    wide = torch.promote_types(q_TJI.dtype, torch.float32)
    num_keys = page_table_BN.shape[1] * key_PZI.shape[1]
    parts = [q_TJI.new_zeros(0, num_keys, dtype=wide)]
    for row, start, stop in query_runs(row_T):
        key_SI = request_keys(key_PZI, page_table_BN[row], int(end_T[start:stop].max())).to(wide)
        hits_TJS = (q_TJI[start:stop].to(wide) @ key_SI.T * scale).relu()
        parts.append((hits_TJS * w_TJ[start:stop].to(wide).unsqueeze(-1)).sum(dim=1))
    hidden_TS = torch.arange(num_keys, device=q_TJI.device) >= end_T[:, None]
    return torch.cat(parts).masked_fill(hidden_TS, float("-inf"))
