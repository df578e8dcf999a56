"""GPTQ: columns are rounded one by one, and the rounding error of each is compensated by the remaining columns.

    H = X^T X + damp mean(diag) I        H^-1 = U^T U, U upper triangular
    q_k = round(w_k / s_k)    e = (w_k - s_k q_k) / U_kk    w_j <- w_j - e U_kj    for j > k

Scales are given and do not change. Columns are processed in order of decreasing input size (act_order), and keep the
group that they have in the file. Updates of columns beyond the current block are one matrix product. A stack of experts
is one batch. Source: GPTQ (arXiv 2210.17323), sections 3.2 and 3.3.
"""

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.kernels.gptq_block import gptq_block
from glm5.quant.chunks import elements_at_once, stacked, wide
from glm5.quant.record import FP8, Grid, Quantized

DAMP = 0.01
BLOCK = 128

_MAX_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 30}  # of weights and Hessians at a time; on a CPU per core
_MAX_FACTORED = {"cpu": 1 << 24, "cuda": 1}  # elements of Hessians factored at a time; batches are slow on a GPU


def gram(x: Tensor) -> Tensor:
    """X^T X [..., I, I] of tokens x [..., T, I], in float32 (float64 for float64); rows of zeros add nothing.

    Sums over batches of tokens give the Hessian. Matrices that read the same inputs share it: stack their rows.
    """
    x = wide(x)
    return x.mT @ x


def gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    scale: Tensor,
    *,
    damp: float = DAMP,
    block: int = BLOCK,
    largest_first: bool = True,
) -> Quantized:
    """Quantize weight [..., O, I] with the given scale, for inputs with Hessian [..., I, I] (`gram`, up to a factor).

    An all-zero Hessian, of an expert without tokens, gives plain rounding. Hessians are factored in float64. Raises
    ConfigError for grids other than symmetric int or fp8 by channel, group or tensor.
    """
    if grid.kind == "nvfp4" or not grid.symmetric or grid.scope not in ("channel", "group", "tensor"):
        raise ConfigError(f"GPTQ is for symmetric grids by channel, group or tensor, not for {grid}")
    codes = torch.empty(weight.shape, dtype=FP8 if grid.kind == "fp8" else torch.int8, device=weight.device)
    flat, hessians, scales, out = stacked(weight), stacked(hessian), stacked(scale), stacked(codes)
    per_matrix = max(weight.shape[-2:]) * weight.shape[-1]
    at_once = max(1, elements_at_once(weight.device, _MAX_ELEMENTS) // per_matrix)
    for start in range(0, len(flat), at_once):
        batch = slice(start, start + at_once)
        w = wide(flat[batch]).clone()
        column_scale = grid.broadcast(scales[batch], w.shape)
        order = _order(hessians[batch], largest_first)
        factor = _factors(hessians[batch], order, damp, w.dtype)
        w = w.gather(-1, order.unsqueeze(-2).expand_as(w))
        if column_scale.shape[-1] > 1:
            column_scale = column_scale.gather(-1, order.unsqueeze(-2).expand_as(w))
        q = _rounded_by_columns(w, factor, grid, column_scale, block)
        back = order.argsort(-1).unsqueeze(-2).expand_as(q)
        out[batch] = q.gather(-1, back).to(codes.dtype)
    return Quantized(grid, codes, scale)


def _order(hessian: Tensor, largest_first: bool) -> Tensor:
    """Columns in processing order, [b, I]."""
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    if largest_first:
        return diagonal.sort(dim=-1, descending=True, stable=True).indices
    return torch.arange(diagonal.shape[-1], device=hessian.device).expand_as(diagonal)


def _factors(hessian: Tensor, order: Tensor, damp: float, dtype: torch.dtype) -> Tensor:
    """U [b, I, I] of the permuted Hessians, rounded to `dtype`."""
    factors = torch.empty(hessian.shape, dtype=dtype, device=hessian.device)
    at_once = max(1, elements_at_once(hessian.device, _MAX_FACTORED) // hessian.shape[-1] ** 2)
    for start in range(0, len(hessian), at_once):
        batch = slice(start, start + at_once)
        factors[batch] = _factor(hessian[batch], order[batch], damp)
    return factors


def _factor(hessian: Tensor, order: Tensor, damp: float) -> Tensor:
    """U [b, I, I] in float64.

    With H = R R^T, R upper triangular (a Cholesky factorization of H with rows and columns reversed), U is R^-1. So H
    itself is never inverted.
    """
    h = hessian.double()
    h = h.gather(-1, order.unsqueeze(-2).expand_as(h)).gather(-2, order.unsqueeze(-1).expand_as(h))
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    diagonal += torch.where(mean > 0, damp * mean, torch.ones_like(mean))
    reverse = torch.linalg.cholesky(h.flip(-2, -1)).flip(-2, -1)
    identity = torch.eye(h.shape[-1], dtype=h.dtype, device=h.device).expand_as(h)
    return torch.linalg.solve_triangular(reverse, identity, upper=True)


def _rounded_by_columns(w: Tensor, factor: Tensor, grid: Grid, scale: Tensor, block: int) -> Tensor:
    """Codes of w [b, O, I], which is overwritten; factor [b, I, I]; scale [b, O, I] or broadcasting to it."""
    q, width = torch.empty_like(w), w.shape[-1]
    for start in range(0, width, block):
        stop = min(start + block, width)
        q[..., start:stop], error = gptq_block(
            w[..., start:stop],
            factor[:, start:stop, start:stop],
            scale if scale.shape[-1] == 1 else scale[..., start:stop],
            quant_min=grid.quant_min,
            quant_max=grid.quant_max,
            fp8=grid.kind == "fp8",
        )
        w[..., stop:] -= error @ factor[:, start:stop, stop:]
    return q
