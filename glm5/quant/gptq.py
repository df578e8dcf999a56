"""GPTQ: columns are rounded one by one, and what each got wrong is made good by those still to come.

    H = X^T X + damp mean(diag) I        H^-1 = U^T U, U upper triangular
    q_k = round(w_k / s_k)    e = (w_k - s_k q_k) / U_kk    w_j <- w_j - e U_kj    for j > k

Scales are given, and stay: a column's group is the one it has in the file, in whatever order columns are taken (those
with the largest inputs first). Updates beyond a block of columns are gathered into one product. A stack of experts is
one batch: a column of all of them at a time. Source: GPTQ (arXiv 2210.17323), sections 3.2 and 3.3.
"""

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.kernels.gptq_block import gptq_block
from glm5.quant.chunks import elements_at_once, stacked, wide
from glm5.quant.record import FP8, Grid, Quantized

DAMP = 0.01
BLOCK = 128

_MOST = {"cpu": 1 << 17, "cuda": 1 << 30}  # elements of weights and Hessians at a time; on a CPU, of a core
_FACTORED = {"cpu": 1 << 24, "cuda": 1}  # of Hessians in float64 at a time; a GPU's batches of large ones are slow


def gram(x: Tensor) -> Tensor:
    """X^T X [..., K, K] of tokens x [..., T, K], in float32 (float64 for float64); rows of zeros add nothing.

    Sum it over batches of tokens. Matrices that read the same inputs share it: stack their rows.
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
    """weight [..., O, K] under `scale`, for inputs with Hessian [..., K, K] (`gram`, up to a factor).

    An all-zero Hessian, of an expert without tokens, gives plain rounding. Hessians are factored in float64.
    """
    if grid.kind == "nvfp4" or not grid.symmetric or grid.scope not in ("channel", "group", "tensor"):
        raise ConfigError(f"GPTQ is for symmetric grids by channel, group or tensor, not for {grid}")
    codes = torch.empty(weight.shape, dtype=FP8 if grid.kind == "fp8" else torch.int8, device=weight.device)
    flat, hessians, scales, out = stacked(weight), stacked(hessian), stacked(scale), stacked(codes)
    largest = max(weight.shape[-2:]) * weight.shape[-1]
    at_once = max(1, elements_at_once(weight.device, _MOST) // largest)
    for start in range(0, len(flat), at_once):
        some = slice(start, start + at_once)
        w = wide(flat[some]).clone()
        of_columns = grid.broadcast(scales[some], w.shape)
        order = _order(hessians[some], largest_first)
        factor = _factors(hessians[some], order, damp, w.dtype)
        w = w.gather(-1, order.unsqueeze(-2).expand_as(w))
        if of_columns.shape[-1] > 1:
            of_columns = of_columns.gather(-1, order.unsqueeze(-2).expand_as(w))
        q = _rounded_by_columns(w, factor, grid, of_columns, block)
        back = order.argsort(-1).unsqueeze(-2).expand_as(q)
        out[some] = q.gather(-1, back).to(codes.dtype)
    return Quantized(grid, codes, scale)


def _order(hessian: Tensor, largest_first: bool) -> Tensor:
    """Columns in the order in which they are taken, [b, K]."""
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    if largest_first:
        return diagonal.sort(dim=-1, descending=True, stable=True).indices
    return torch.arange(diagonal.shape[-1], device=hessian.device).expand_as(diagonal)


def _factors(hessian: Tensor, order: Tensor, damp: float, dtype: torch.dtype) -> Tensor:
    """U [b, K, K] by order, rounded to `dtype`."""
    factors = torch.empty(hessian.shape, dtype=dtype, device=hessian.device)
    at_once = max(1, elements_at_once(hessian.device, _FACTORED) // hessian.shape[-1] ** 2)
    for start in range(0, len(hessian), at_once):
        some = slice(start, start + at_once)
        factors[some] = _factor(hessian[some], order[some], damp)
    return factors


def _factor(hessian: Tensor, order: Tensor, damp: float) -> Tensor:
    """U [b, K, K] in float64.

    With H = R R^T, R upper triangular (Cholesky's from the last column on), U is R^-1: one factorization, no inverse
    of H.
    """
    h = hessian.double()
    h = h.gather(-1, order.unsqueeze(-2).expand_as(h)).gather(-2, order.unsqueeze(-1).expand_as(h))
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    some = diagonal.mean(-1, keepdim=True)
    diagonal += torch.where(some > 0, damp * some, torch.ones_like(some))
    reverse = torch.linalg.cholesky(h.flip(-2, -1)).flip(-2, -1)
    identity = torch.eye(h.shape[-1], dtype=h.dtype, device=h.device).expand_as(h)
    return torch.linalg.solve_triangular(reverse, identity, upper=True)


def _rounded_by_columns(w: Tensor, factor: Tensor, grid: Grid, scale: Tensor, block: int) -> Tensor:
    """Codes of w [b, O, K], which is used up; factor [b, K, K]; scale [b, O, K] or broadcasting to it."""
    q, width = torch.empty_like(w), w.shape[-1]
    for start in range(0, width, block):
        stop = min(start + block, width)
        q[..., start:stop], wrong = gptq_block(
            w[..., start:stop],
            factor[:, start:stop, start:stop],
            scale if scale.shape[-1] == 1 else scale[..., start:stop],
            quant_min=grid.quant_min,
            quant_max=grid.quant_max,
            fp8=grid.kind == "fp8",
        )
        w[..., stop:] -= wrong @ factor[:, start:stop, stop:]
    return q
