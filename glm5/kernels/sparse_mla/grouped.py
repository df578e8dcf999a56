"""Latent attention for few queries of each of many requests, on a CPU and without a gradient.

Of selected keys, K rows a query are gathered, and NumPy says which. Where every visible key is read, requests that are
alike share one batched product (groups.py). With few queries the definition spends most of its time on small tensors.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.groups import plan_groups
from glm5.kernels.paging import read_rows

_GATHERED = 1 << 18  # latent values gathered at a time: 1 MB in float32, about one core's L2
# Not -inf: a row with nothing visible must stay free of NaN. exp(_HIDDEN - max) is zero next to any visible key.
_HIDDEN = -1e30


@torch.no_grad()
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
    if keys_TK is None or not len(keys_TK):
        return _attend_to_all(q_THL, latent_PZL, page_table_BN, row_T, end_T, scale, value_dim)
    keys, ends = keys_TK.numpy(), end_T.numpy()
    hidden = (keys < 0) | (keys >= ends[:, None])
    slots_TK = torch.from_numpy(_slots(keys, hidden, page_table_BN.numpy(), row_T.numpy(), latent_PZL.shape[1]))
    step = max(1, _GATHERED // max(1, keys.shape[1] * q_THL.shape[2]))
    parts = [
        _attend(q, read_rows(latent_PZL, slots), hidden[first : first + step], scale, value_dim)
        for first, q, slots in zip(range(0, len(keys), step), q_THL.split(step), slots_TK.split(step), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _slots(
    keys: NDArray[np.int32], hidden: NDArray[np.bool_], table: NDArray[np.int32], rows: NDArray[np.int32], size: int
) -> NDArray[np.int64]:
    """Pool slots [T, K] of logical keys; of hidden ones, that of the request's key 0."""
    keys = np.where(hidden, 0, keys)
    columns = keys // size
    return table[rows[:, None], columns].astype(np.int64) * size + (keys - columns * size)


def _attend_to_all(
    q_THL: Tensor,
    latent_PZL: Pool,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    num_queries, num_heads, _ = q_THL.shape
    out_THC = q_THL.new_zeros(num_queries, num_heads, value_dim)
    lse_TH = torch.full((num_queries, num_heads), float("-inf"), dtype=torch.promote_types(q_THL.dtype, torch.float32))
    for group in plan_groups(row_T, end_T, latent_PZL.shape[1], num_heads):
        latent_GSL = group.keys(latent_PZL, page_table_BN)
        num_requests, num_keys, _ = latent_GSL.shape
        ends = end_T.numpy()[group.query_X]
        # What a pool holds beyond a request's keys may be NaN, which a probability of 0 does not hide.
        last_G = torch.from_numpy(ends.reshape(num_requests, -1).max(axis=1))
        seen = int(last_G.min())
        beyond_GS = torch.arange(seen, num_keys) >= last_G[:, None]
        latent_GSL[:, seen:].masked_fill_(beyond_GS[..., None], 0.0)
        hidden = np.arange(num_keys) >= ends[:, None]
        parts = _attend(group.of(q_THL), latent_GSL, hidden, scale, value_dim)
        for whole, part in zip((out_THC, lse_TH), parts, strict=True):
            whole.index_copy_(0, torch.from_numpy(group.query_X), part)
    return out_THC, lse_TH


def _attend(
    q_XHL: Tensor, latent_GSL: Tensor, hidden_XS: NDArray[np.bool_], scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Attention of X queries, X / G for each list of latents; every list is as long and free of NaN if it is seen."""
    wide = torch.promote_types(q_XHL.dtype, torch.float32)
    num_lists, num_keys, width = latent_GSL.shape
    latent_GSL = latent_GSL.to(wide)
    q_GYL = q_XHL.to(wide).reshape(num_lists, -1, width)
    # beta=0: the first argument is not read. alpha costs nothing, where a multiplication would be one more pass.
    logits_GYS = torch.baddbmm(q_GYL.new_empty(1, 1, 1), q_GYL, latent_GSL.mT, beta=0, alpha=scale)
    logits_XHS = logits_GYS.view(*q_XHL.shape[:2], num_keys)
    any_hidden = bool(hidden_XS.any())
    if any_hidden:
        bias_XS = torch.from_numpy(np.where(hidden_XS, np.float32(_HIDDEN), np.float32(0)))
        logits_XHS += bias_XS[:, None]
    p_XHS = logits_XHS.softmax(dim=-1)
    # log-sum-exp from the largest term: e^top / sum = p at the top.
    lse_XH = logits_XHS.amax(dim=-1) - p_XHS.amax(dim=-1).log()
    p_GYS = p_XHS.to(q_XHL.dtype).to(wide).view(num_lists, -1, num_keys)
    out_XHC = torch.bmm(p_GYS, latent_GSL[..., :value_dim]).view(*q_XHL.shape[:2], value_dim).to(q_XHL.dtype)
    if any_hidden and (empty := hidden_XS.all(axis=1)).any():
        empty_X11 = torch.from_numpy(empty)[:, None, None]
        out_XHC.masked_fill_(empty_X11, 0.0)
        lse_XH.masked_fill_(empty_X11[..., 0], float("-inf"))
    return out_XHC, lse_XH
