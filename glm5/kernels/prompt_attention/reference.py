"""Causal attention among the tokens of one pass, over expanded keys and values (model spec 3.3, not absorbed).

    p[t, h, s]  = softmax_s( (q[t, h] . [k[s, h], rope[s]]) * scale )       for first[t] <= s <= t
    out[t, h]   = sum_s p[t, h, s] v[s, h]
    lse[t, h]   = log sum_s exp( (q . k) * scale )

Logits, softmax and sums are float32; p is rounded to q's dtype in between. This file is the definition.
"""

import torch
from torch import Tensor


def prompt_attention(
    q_THX: Tensor, k_THN: Tensor, rope_TR: Tensor, v_THV: Tensor, first_T: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] in float32); float64 stays float64. One head at a time."""
    wide = torch.promote_types(q_THX.dtype, torch.float32)
    num_tokens, num_heads, _ = q_THX.shape
    t = torch.arange(num_tokens, device=q_THX.device)
    hidden_TS = (t[None, :] > t[:, None]) | (t[None, :] < first_T[:, None])
    empty_T1 = hidden_TS.all(dim=1, keepdim=True)
    outs, lses = [], []
    for h in range(num_heads):
        k_TX = torch.cat([k_THN[:, h], rope_TR], dim=-1).to(wide)
        logits_TS = (q_THX[:, h].to(wide) @ k_TX.T * scale).masked_fill(hidden_TS, float("-inf"))
        lse_T1 = logits_TS.masked_fill(empty_T1, 0.0).logsumexp(dim=-1, keepdim=True)
        p_TS = (logits_TS - lse_T1).exp().to(q_THX.dtype)
        outs.append((p_TS.to(wide) @ v_THV[:, h].to(wide)).to(q_THX.dtype))
        lses.append(lse_T1.masked_fill(empty_T1, float("-inf"))[:, 0])
    return torch.stack(outs, dim=1), torch.stack(lses, dim=1)
