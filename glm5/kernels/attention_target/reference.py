"""The target of the indexer: attention probabilities averaged over heads.

    target[t, s] = mean_h exp( (q[t, h] . latent[s]) * scale - lse[t, h] )

Over the keys of the softmax (visible, and selected if `keys` is given); 0 elsewhere.
"""

import torch
from torch import Tensor

from glm5.kernels.paging import query_runs, request_keys


@torch.no_grad()
def head_mean_probs(
    q_THL: Tensor,
    latent_PZL: Tensor,
    keys_TK: Tensor | None,
    lse_TH: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
) -> Tensor:
    """[T, K] aligned with `keys_TK`, or [T, S] where it is None; float32 (float64 for float64). No gradient."""
    wide = torch.promote_types(q_THL.dtype, torch.float32)
    num_keys = page_table_BN.shape[1] * latent_PZL.shape[1]
    parts = [q_THL.new_zeros(0, num_keys if keys_TK is None else keys_TK.shape[1], dtype=wide)]
    for row, start, stop in query_runs(row_T):
        latent_SL = request_keys(latent_PZL, page_table_BN[row], int(end_T[start:stop].max())).to(wide)
        logits_THS = q_THL[start:stop].to(wide) @ latent_SL.T * scale
        target_TS = (logits_THS - lse_TH[start:stop, :, None]).exp().mean(dim=1)
        if keys_TK is not None:
            target_TS = target_TS.gather(1, keys_TK[start:stop].long().clamp_min(0))
        parts.append(target_TS)
    keys = torch.arange(num_keys, device=q_THL.device) if keys_TK is None else keys_TK
    hidden = (keys < 0) | (keys >= end_T[:, None])
    return torch.cat(parts).masked_fill(hidden, 0.0)
