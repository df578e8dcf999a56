"""Latent attention over gathered keys in one shape: every query reads exactly K rows.

A key that is not to be read is replaced by the query's key 0 and hidden from the softmax. The result of a query is
then a function of its keys and their order alone, as long as K stays the same: callers give every selection the same
width, padded with -1. Forward only.
"""

import torch
from torch import Tensor

from glm5.kernels.dispatch import forward_only
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.paging import key_slots, read_rows

# Latent values gathered at a time: 1 MB in float32 on a CPU, 128 MB elsewhere.
_GATHERED_CPU, _GATHERED = 1 << 18, 1 << 25


@forward_only("sparse_mla[invariant]")
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
    """As `reference.sparse_mla`, without gradients. Raises ValueError where `keys_TK` is None."""
    if keys_TK is None:
        raise ValueError("sparse_mla[invariant] reads selections of one width: give keys_TK, padded with -1; got None")
    hidden_TK = (keys_TK < 0) | (keys_TK >= end_T[:, None])
    slots_TK = key_slots(keys_TK.masked_fill(hidden_TK, 0), page_table_BN.clamp_min(0), row_T, latent_PZL.shape[1])
    step = _step(q_THL, keys_TK.shape[1])
    pieces = zip(q_THL.split(step), slots_TK.split(step), hidden_TK.split(step), strict=True)
    outs, lses = zip(
        *(_attend(q, latent_PZL, slots, hidden, scale, value_dim) for q, slots, hidden in pieces), strict=True
    )
    empty_T = hidden_TK.all(dim=-1)
    out_THC, lse_TH = torch.cat(outs), torch.cat(lses)
    return out_THC.masked_fill_(empty_T[:, None, None], 0.0), lse_TH.masked_fill_(empty_T[:, None], float("-inf"))


def _step(q_THL: Tensor, num_keys: int) -> int:
    """Queries of a piece: all of them, halved while they are even and have too many keys."""
    limit = _GATHERED_CPU if q_THL.device.type == "cpu" else _GATHERED
    step = len(q_THL)
    while step * num_keys * q_THL.shape[2] > limit and step % 2 == 0:
        step //= 2
    return max(1, step)


def _attend(
    q_THL: Tensor, latent_PZL: Pool, slots_TK: Tensor, hidden_TK: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_THL.dtype, torch.float32)
    latent_TKL = read_rows(latent_PZL, slots_TK).to(wide)
    logits_THK = torch.bmm(q_THL.to(wide) * scale, latent_TKL.mT).masked_fill_(hidden_TK[:, None], float("-inf"))
    p_THK = logits_THK.softmax(dim=-1)
    # log-sum-exp from the largest term: e^top / sum = p at the top.
    lse_TH = logits_THK.amax(dim=-1) - p_THK.amax(dim=-1).log()
    out_THC = torch.bmm(p_THK.to(q_THL.dtype).to(wide), latent_TKL[..., :value_dim])
    return out_THC.to(q_THL.dtype), lse_TH
