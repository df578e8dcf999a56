"""KL divergence of the indexer's softmax from the attention probabilities, summed over queries.

    P[t, s] = mean over served layers and heads of attention[h, t, s]
    KL      = sum over t of sum_s P[t, s] (log P[t, s] - log softmax(score[t, :])[s])

over the visible keys, or the selected ones if `keys` is given. This file is the definition: it computes scores and
attention of all queries with all keys at once.
"""

import torch
from torch import Tensor

from glm5.kernels.attention_target import head_mean_probs
from glm5.kernels.index_score import index_score

Served = tuple[Tensor, Tensor, Tensor]  # of a layer: its queries [T, H, L], latents [P, Z, L], and lse [T, H]


def index_kl(
    q_TJI: Tensor,
    key_PZI: Tensor,
    w_TJ: Tensor,
    served: list[Served],
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    index_scale: float,
    scale: float,
) -> Tensor:
    """A scalar in float32 (float64 for float64)."""
    where = (page_table_BN, row_T, end_T)
    score = index_score(q_TJI, key_PZI, w_TJ, *where, scale=index_scale, impl="reference")
    target = torch.stack(
        [head_mean_probs(q, latent, keys_TK, lse, *where, scale=scale, impl="reference") for q, latent, lse in served]
    ).mean(0)
    if keys_TK is None:
        hidden = score.isneginf()
    else:
        hidden = (keys_TK < 0) | (keys_TK >= end_T[:, None])
        score = score.gather(1, keys_TK.clamp_min(0).long())
    log_q = score.masked_fill(hidden, float("-inf")).log_softmax(dim=-1).masked_fill(hidden, 0.0)
    return (torch.special.xlogy(target, target) - target * log_q).sum()
