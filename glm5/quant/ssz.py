"""SSZ: the scale of least squared error for each row or group, by alternating optimisation of scale and codes.

    q = clamp(round(w / s), quant_min, quant_max)            the best codes for a scale
    s = sum_k h_k w_k q_k / sum_k h_k q_k^2             the best scale for the codes, h = 1 or the inputs' importance

Each step lowers the error, down to a local minimum that depends on the start (Lloyd-Max on a uniform grid).
`ssz_upstream` is msModelSlim's (`core/quantizer/impl/ssz.py`): one start, at the min-max scale. `ssz` tries many starts
and continues from the best one until its codes do not change; its error is that of a search over a hundred scales, with
a third of the passes.

Asymmetric grids have an integer offset as well, which is optimised in turn with the other two (`ssz_asymmetric`):

    q = clamp(round(w / s + o), quant_min, quant_max)   s = sum h w (q - o) / sum h (q - o)^2   o = mean_h(q - w / s)

With h_k = E[x_k^2], the diagonal of GPTQ's Hessian, it is the error of the output for uncorrelated inputs.
"""

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.kernels.ssz import ssz as many_starts
from glm5.quant.chunks import chunks, stacked, wide
from glm5.quant.minmax import as_groups, minmax
from glm5.quant.record import Grid

STARTS = tuple(round(1 - 0.05 * i, 2) for i in range(18))
"""Factors of the min-max scale: 1 down to 0.15."""
REFINE = 10
"""Steps from the best of them, at most."""

_TINY = 1e-30  # divisor where all codes are zero


def ssz(
    weight: Tensor,
    grid: Grid,
    importance: Tensor | None = None,
    *,
    starts: tuple[float, ...] = STARTS,
    steps: int = 2,
    refine: int = REFINE,
) -> Tensor:
    """Scale of `grid` for weight [..., O, I], float32 (float64 for float64): `steps` steps from every start, then up to
    `refine` steps from the best.

    `importance` [..., I]: h >= 0 of each input, the same for every row. Raises ConfigError for grids other than
    symmetric integers by channel or group.
    """
    _check_grid(grid)
    shape = grid.scale_shape(weight.shape)
    scale = torch.empty(shape, dtype=wide(weight[..., :0]).dtype, device=weight.device)
    for batch, rows in chunks(flat := stacked(weight)):
        h = None if importance is None else _importance(importance, grid, batch, weight)
        stacked(scale)[batch, rows] = many_starts(
            as_groups(flat[batch, rows], grid),
            h,
            quant_min=grid.quant_min,
            quant_max=grid.quant_max,
            starts=starts,
            steps=steps,
            refine=refine,
        )
    return scale


def ssz_upstream(weight: Tensor, grid: Grid, steps: int = 50) -> Tensor:
    """Scale of `grid` for weight [..., O, I] as in msModelSlim, which uses 10 steps in its search, 50 in its quantizer.

    It stops early when no row of a matrix improves by more than thresholds that depend on the scale of the weights.
    """
    _check_grid(grid)
    scale, _ = minmax(weight, grid)
    for idx, matrix in enumerate(stacked(weight)):
        stacked(scale)[idx] = _one_start(as_groups(wide(matrix), grid), grid, stacked(scale)[idx], steps)
    return scale


def ssz_asymmetric(
    weight: Tensor,
    grid: Grid,
    importance: Tensor | None = None,
    *,
    starts: tuple[float, ...] = STARTS,
    steps: int = 2,
    refine: int = REFINE,
) -> tuple[Tensor, Tensor]:
    """(scale, offset) of an asymmetric `grid` for weight [..., O, I]; as `ssz`, starts are shares of the range."""
    _check_grid(grid, symmetric=False)
    first, offset = minmax(weight, grid)
    assert offset is not None
    scale = torch.empty_like(first)
    for batch, rows in chunks(flat := stacked(weight)):
        h = None if importance is None else _importance(importance, grid, batch, weight).unsqueeze(1)
        w = as_groups(wide(flat[batch, rows]), grid)
        best = _AsymmetricSearch(w, torch.ones_like(w) if h is None else h.expand_as(w), grid)
        minmax_scale, middle = stacked(first)[batch, rows], _middle(w)
        best.consider(minmax_scale, stacked(offset)[batch, rows])
        for start in starts:
            s = minmax_scale * start
            o = (0.5 * (grid.quant_min + grid.quant_max) - middle / s).round_().clamp_(grid.quant_min, grid.quant_max)
            for _ in range(steps):
                s, o = best.consider(*best.step(s, o))
        for _ in range(refine):
            best.consider(*best.step(best.scale, best.offset))
        stacked(scale)[batch, rows], stacked(offset)[batch, rows] = best.scale, best.offset
    return scale, offset


def _middle(w: Tensor) -> Tensor:
    """The middle of the range of w [..., g] and 0."""
    return 0.5 * (w.amax(-1).clamp_min(0) + w.amin(-1).clamp_max(0))


class _AsymmetricSearch:
    """The best scale and offset so far of groups w [..., g] under weights h."""

    def __init__(self, w: Tensor, h: Tensor, grid: Grid) -> None:
        self.w, self.h, self.grid = w, h, grid
        self.scale, self.offset = torch.ones_like(w[..., 0]), torch.zeros_like(w[..., 0])
        self.least_error = torch.full_like(self.scale, torch.inf)

    def consider(self, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        error = self.w - scale.unsqueeze(-1) * (_codes(self.w, scale, self.grid, offset) - offset.unsqueeze(-1))
        error = (self.h * error.square_()).sum(-1)
        better = error < self.least_error
        self.least_error = torch.where(better, error, self.least_error)
        self.scale, self.offset = torch.where(better, scale, self.scale), torch.where(better, offset, self.offset)
        return scale, offset

    def step(self, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        q = _codes(self.w, scale, self.grid, offset)
        size = self.h.sum(-1).clamp_min(_TINY)
        offset = ((self.h * (q - self.w / scale.unsqueeze(-1))).sum(-1) / size).round_()
        offset = offset.clamp_(self.grid.quant_min, self.grid.quant_max)  # so that 0 has a code
        moved = q - offset.unsqueeze(-1)
        found = (self.h * self.w * moved).sum(-1) / (self.h * moved.square()).sum(-1).clamp_min_(_TINY)
        return torch.where(found > 0, found, scale), offset


def _one_start(w: Tensor, grid: Grid, first: Tensor, steps: int) -> Tensor:
    """The best scale [O, n] that `steps` steps from the scale `first` [O, n] reach, for w [O, n, g]."""
    scale = best = first
    q = _codes(w, scale, grid)
    least_error = (w - scale.unsqueeze(-1) * q).square().mean(-1)
    for _ in range(steps):
        scale = (w * q).sum(-1) / q.square().sum(-1).clamp_min(_TINY)
        q = _codes(w, scale, grid)
        error = (w - scale.unsqueeze(-1) * q).square().mean(-1)
        gain = least_error - error
        if bool(((gain / least_error.clamp_min(1e-4) < 1e-10) | (gain.abs() < 1e-10)).all()):
            break
        best, least_error = torch.where(error < least_error, scale, best), torch.minimum(error, least_error)
    return best


def _codes(w: Tensor, scale: Tensor, grid: Grid, offset: Tensor | None = None) -> Tensor:
    w = w / scale.unsqueeze(-1)
    if offset is not None:
        w += offset.unsqueeze(-1)
    return w.round_().clamp_(grid.quant_min, grid.quant_max)


def _importance(importance: Tensor, grid: Grid, batch: slice, weight: Tensor) -> Tensor:
    """h [..., I] of a batch of the stack's matrices, by groups: [b, n, g], or [1, n, g] if they share it."""
    h = wide(importance.to(weight.device)).reshape(-1, 1, importance.shape[-1])
    return as_groups(h[batch] if len(h) > 1 else h, grid).squeeze(1)


def _check_grid(grid: Grid, *, symmetric: bool = True) -> None:
    if grid.kind != "int" or grid.symmetric != symmetric or grid.scope not in ("channel", "group"):
        kind = "symmetric" if symmetric else "asymmetric"
        raise ConfigError(f"SSZ is for {kind} integers by channel or group here, not for {grid}: use minmax")
