"""Latent attention over selected keys, gathered one by one.

    p[t, h, k]  = softmax_k( (q[t, h] . latent[key[t, k]]) * scale )       keys that are -1 or >= end[t] take no part
    out[t, h]   = sum_k p[t, h, k] latent[key[t, k]][:value_dim]
    lse[t, h]   = log sum_k exp( (q . latent) * scale )

Logits, softmax and sums are float32; p is rounded to q's dtype in between, as in the published model (model spec 3.3).
This file is the definition. Queries are taken some at a time: all gathered latents at once would not fit in memory, and
on a CPU a piece that stays in cache is gathered 2.5 times faster.
"""

import torch
from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.paging import key_slots, read_rows

# Latent values gathered at a time: 4 MB in float32 on a CPU, 128 MB elsewhere.
_GATHERED_CPU, _GATHERED = 1 << 20, 1 << 25


def sparse_mla(
    q_THL: Tensor,
    latent_PZL: Pool,
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, value_dim] in q's dtype, lse [T, H] in float32); float64 stays float64."""
    num_queries, page_size = q_THL.shape[0], latent_PZL.shape[1]
    if keys_TK is None:
        num_keys = page_table_BN.shape[1] * page_size
        keys_TK = torch.arange(num_keys, device=q_THL.device).expand(num_queries, -1)
    hidden_TK = (keys_TK < 0) | (keys_TK >= end_T[:, None])
    slots_TK = key_slots(keys_TK.masked_fill(hidden_TK, 0), page_table_BN, row_T, page_size)
    step = queries_at_a_time(q_THL, keys_TK.shape[1])
    pieces = zip(q_THL.split(step), slots_TK.split(step), hidden_TK.split(step), strict=True)
    outs, lses = zip(
        *(attend(q, latent_PZL, slots, hidden, scale, value_dim) for q, slots, hidden in pieces), strict=True
    )
    return torch.cat(outs), torch.cat(lses)


def queries_at_a_time(q_THL: Tensor, num_keys: int) -> int:
    """Queries whose latents are gathered together."""
    values = _GATHERED_CPU if q_THL.device.type == "cpu" else _GATHERED
    return max(1, values // max(1, num_keys * q_THL.shape[2]))


def attend(
    q_THL: Tensor, latent_PZL: Pool, slots_TK: Tensor, hidden_TK: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """(out, lse) of some queries, whose keys lie in `slots_TK`; those that are `hidden_TK` take no part."""
    wide = torch.promote_types(q_THL.dtype, torch.float32)
    latent_TKL = read_rows(latent_PZL, slots_TK).masked_fill(hidden_TK[..., None], 0.0).to(wide)
    logits_THK = torch.einsum("thl,tkl->thk", q_THL.to(wide), latent_TKL) * scale
    hidden_T1K = hidden_TK[:, None]
    # A finite stand-in for "nothing visible": exp(-inf - -inf) would be NaN, forward and backward.
    empty_T11 = hidden_TK.all(dim=-1)[:, None, None]
    lse_TH1 = logits_THK.masked_fill(hidden_T1K, float("-inf")).masked_fill(empty_T11, 0.0).logsumexp(-1, keepdim=True)
    p_THK = (logits_THK - lse_TH1).exp().masked_fill(hidden_T1K, 0.0).to(q_THL.dtype)
    out_THC = torch.einsum("thk,tkc->thc", p_THK.to(wide), latent_TKL[..., :value_dim])
    return out_THC.to(q_THL.dtype), lse_TH1.masked_fill(empty_T11, float("-inf")).squeeze(-1)
