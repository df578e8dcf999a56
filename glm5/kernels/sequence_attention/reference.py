"""Causal attention of packed sequences, one sequence at a time.

    p[t, h, s] = softmax_s( q[t, h] . k[s, h] scale )  over s <= t of t's sequence      out[t, h] = sum_s p v[s, h]

Logits, softmax and sums are float32, p is rounded to q's dtype in between. This file is the definition; it holds all
logits of a sequence.
"""

import torch
from torch import Tensor


def sequence_attention(
    q_THX: Tensor, k_THX: Tensor, v_THV: Tensor, lengths: list[int], *, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] in float32); float64 stays float64."""
    pieces = zip(q_THX.split(lengths), k_THX.split(lengths), v_THV.split(lengths), strict=True)
    outs, lses = zip(*(_attend(q, k, v, scale) for q, k, v in pieces), strict=True)
    return torch.cat(outs), torch.cat(lses)


def _attend(q_THX: Tensor, k_THX: Tensor, v_THV: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_THX.dtype, torch.float32)
    logits_HTS = torch.einsum("thx,shx->hts", q_THX.to(wide), k_THX.to(wide)) * scale
    later_TS = torch.ones_like(logits_HTS[0], dtype=torch.bool).triu(1)
    logits_HTS = logits_HTS.masked_fill(later_TS, float("-inf"))
    p_HTS = logits_HTS.softmax(dim=-1).to(q_THX.dtype).to(wide)
    out_THV = torch.einsum("hts,shv->thv", p_HTS, v_THV.to(wide))
    return out_THV.to(q_THX.dtype), logits_HTS.logsumexp(dim=-1).T
