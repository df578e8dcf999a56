"""Latent attention for few queries of each of many requests, on a CPU and without a gradient.

Selected keys are gathered, K rows per query, with indices computed by NumPy. If every visible key is read, requests of
similar length share one batched product (groups.py). The reference would spend most time on small tensors here.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.kernels.dispatch import forward_only
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.groups import FewQueries
from glm5.kernels.paging import EveryRow

_GATHERED = 1 << 18  # latent values gathered at a time: 1 MB in float32, about one core's L2
# Not -inf: a row with nothing visible must stay free of NaN. exp(_HIDDEN - max) is zero next to any visible key.
_HIDDEN = np.float32(-1e30)


@forward_only("sparse_mla[grouped]")
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
    """As `reference.sparse_mla`, without a gradient. Raises ValueError for tensors that are not in host memory."""
    if q_THL.device.type != "cpu":
        raise ValueError(f"sparse_mla[grouped] needs tensors in host memory, got {q_THL.device}; use impl='gather'")
    few = FewQueries(page_table_BN, row_T, end_T, latent_PZL.shape[1])
    lse_TH = torch.empty(q_THL.shape[:2], dtype=torch.promote_types(q_THL.dtype, torch.float32))
    return attend_few(few, q_THL, latent_PZL, keys_TK, scale=scale, value_dim=value_dim, lse_TH=lse_TH), lse_TH


def attend_few(
    few: FewQueries,
    q_THL: Tensor,
    latent_PZL: Pool,
    keys_TK: Tensor | None,
    *,
    scale: float,
    value_dim: int,
    lse_TH: Tensor | None = None,
    every: EveryRow | None = None,
) -> Tensor:
    """[T, H, value_dim] for queries that are already grouped; fills `lse_TH` if given. No gradient may be required.
    `every`: the pool as `EveryRow`, if the caller has it."""
    if keys_TK is None or not len(keys_TK):
        return _attend_to_all(few, q_THL, latent_PZL, scale, value_dim, lse_TH)
    hidden_TK = few.hidden(keys_TK)
    num_queries, step = len(keys_TK), max(1, _GATHERED // max(1, keys_TK.shape[1] * q_THL.shape[2]))
    if num_queries <= step:
        return _attend(q_THL, few.read(every or latent_PZL, keys_TK), hidden_TK, scale, value_dim, lse_TH)
    outs: list[Tensor] = []
    for first in range(0, num_queries, step):
        part = slice(first, first + step)
        hidden_XK, lse_XH = (None if whole is None else whole[part] for whole in (hidden_TK, lse_TH))
        latent_XKL = few.read(every or latent_PZL, keys_TK, part)
        outs.append(_attend(q_THL[part], latent_XKL, hidden_XK, scale, value_dim, lse_XH))
    return torch.cat(outs)


def _attend_to_all(
    few: FewQueries, q_THL: Tensor, latent_PZL: Pool, scale: float, value_dim: int, lse_TH: Tensor | None
) -> Tensor:
    num_queries, num_heads, _ = q_THL.shape
    out_THC = q_THL.new_zeros(num_queries, num_heads, value_dim)
    if lse_TH is not None:
        lse_TH.fill_(float("-inf"))
    for group in few.groups(num_heads):
        latent_GSL = group.keys(latent_PZL)
        if (beyond_GS := group.beyond) is not None:
            # What a pool holds beyond a request's keys may be NaN, which a probability of 0 does not hide.
            latent_GSL = latent_GSL.masked_fill(beyond_GS[..., None], 0.0)
        query_X = torch.from_numpy(group.query_X)
        lse_XH = None if lse_TH is None else lse_TH.new_empty(len(query_X), num_heads)
        out_XHC = _attend(group.of(q_THL), latent_GSL, group.hidden, scale, value_dim, lse_XH)
        if lse_TH is not None:
            lse_TH.index_copy_(0, query_X, lse_XH)
        if group.whole:
            return out_XHC
        out_THC.index_copy_(0, query_X, out_XHC)
    return out_THC


def _attend(
    q_XHL: Tensor,
    latent_GSL: Tensor,
    hidden_XS: NDArray[np.bool_] | None,
    scale: float,
    value_dim: int,
    lse_XH: Tensor | None,
) -> Tensor:
    """Attention of X queries, X / G for each list of latents; every list is as long and free of NaN if it is seen."""
    num_lists, num_keys, width = latent_GSL.shape
    dtype, wide = q_XHL.dtype, torch.promote_types(q_XHL.dtype, torch.float32)
    if dtype != wide or latent_GSL.dtype != wide:
        q_XHL, latent_GSL = q_XHL.to(wide), latent_GSL.to(wide)
    logits_GYS = torch.bmm(q_XHL.reshape(num_lists, -1, width), latent_GSL.mT).mul_(scale)
    logits_XHS = logits_GYS.view(*q_XHL.shape[:2], num_keys)
    if hidden_XS is not None:
        logits_XHS += torch.from_numpy(np.where(hidden_XS, _HIDDEN, np.float32(0)))[:, None]
    p_XHS = logits_XHS.softmax(dim=-1)
    p_GYS = p_XHS.view(num_lists, -1, num_keys)
    if dtype != wide:
        p_GYS = p_GYS.to(dtype).to(wide)
    out_XHC = torch.bmm(p_GYS, latent_GSL[..., :value_dim]).view(*q_XHL.shape[:2], value_dim).to(dtype)
    if lse_XH is not None:  # from the largest term: e^top / sum = p at the top
        torch.sub(logits_XHS.amax(dim=-1), p_XHS.amax(dim=-1).log(), out=lse_XH)
    if hidden_XS is not None and (empty := hidden_XS.all(axis=1)).any():
        empty_X11 = torch.from_numpy(empty)[:, None, None]
        out_XHC.masked_fill_(empty_X11, 0.0)
        if lse_XH is not None:
            lse_XH.masked_fill_(empty_X11[..., 0], float("-inf"))
    return out_XHC
