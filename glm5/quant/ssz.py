"""SSZ: the scale of least squared error for each row or group, by turns with the codes (Lloyd-Max on an even grid).

    q = clamp(round(w / s), lowest, highest)            the best codes for a scale
    s = sum_k h_k w_k q_k / sum_k h_k q_k^2             the best scale for codes, h = 1 or what the inputs weigh

Each step lowers the error, down to a local minimum that depends on the start. `ssz_upstream` is msModelSlim's
(`core/quantizer/impl/ssz.py`): one start, at min-max's scale. `ssz` tries many starts, keeps the best and follows that
one until its codes stay; it reaches what a grid of a hundred scales reaches, with a third of the passes.

h_k = E[x_k^2] makes it the error of the output for inputs that do not correlate (the diagonal of GPTQ's Hessian).
"""

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.kernels.ssz import ssz as many_starts
from glm5.quant.minmax import as_groups, minmax
from glm5.quant.parts import parts, stacked, wide
from glm5.quant.record import Grid

STARTS = tuple(round(1 - 0.05 * i, 2) for i in range(18))
"""Of min-max's scale: 1 down to 0.15."""

_NOTHING = 1e-30  # sums of squares of codes that are all zero


def ssz(
    weight: Tensor,
    grid: Grid,
    importance: Tensor | None = None,
    *,
    starts: tuple[float, ...] = STARTS,
    steps: int = 2,
    polish: int = 10,
) -> Tensor:
    """Scale of `grid` for weight [..., O, I]: from every start `steps` steps, then up to `polish` from the best.

    `importance` [..., I]: h >= 0 for each input, the same for every row. float32, float64 for float64.
    """
    _refuse(grid)
    shape = grid.scale_shape(weight.shape)
    scale = torch.empty(shape, dtype=wide(weight[..., :0]).dtype, device=weight.device)
    for some, rows in parts(flat := stacked(weight)):
        h = None if importance is None else _importance(importance, grid, some, weight)
        stacked(scale)[some, rows] = many_starts(
            as_groups(flat[some, rows], grid),
            h,
            lowest=grid.lowest,
            highest=grid.highest,
            starts=starts,
            steps=steps,
            polish=polish,
        )
    return scale


def ssz_upstream(weight: Tensor, grid: Grid, steps: int = 50) -> Tensor:
    """Scale of `grid` for weight [..., O, I] as msModelSlim finds it; 10 steps are its search's, 50 its quantizer's.

    It stops early where no row of a matrix improves any more, by thresholds that depend on the scale of the weights.
    """
    _refuse(grid)
    scale, _ = minmax(weight, grid)
    for idx, matrix in enumerate(stacked(weight)):
        stacked(scale)[idx] = _one_start(as_groups(wide(matrix), grid), grid, stacked(scale)[idx], steps)
    return scale


def _one_start(w: Tensor, grid: Grid, first: Tensor, steps: int) -> Tensor:
    """w [O, G, g] and `first` [O, G] to the best scale on the way [O, G]."""
    scale = best = first
    q = _codes(w, scale, grid)
    least = (w - scale.unsqueeze(-1) * q).square().mean(-1)
    for _ in range(steps):
        scale = (w * q).sum(-1) / q.square().sum(-1).clamp_min(_NOTHING)
        q = _codes(w, scale, grid)
        error = (w - scale.unsqueeze(-1) * q).square().mean(-1)
        gain = least - error
        if bool(((gain / least.clamp_min(1e-4) < 1e-10) | (gain.abs() < 1e-10)).all()):
            break
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _codes(w: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    return (w / scale.unsqueeze(-1)).round_().clamp_(grid.lowest, grid.highest)


def _importance(importance: Tensor, grid: Grid, some: slice, weight: Tensor) -> Tensor:
    """h [..., I] for some matrices of the stack, by groups: [b, G, g], or [1, G, g] for all."""
    h = wide(importance.to(weight.device)).reshape(-1, 1, importance.shape[-1])
    return as_groups(h[some] if len(h) > 1 else h, grid).squeeze(1)


def _refuse(grid: Grid) -> None:
    if grid.kind != "int" or not grid.symmetric or grid.scope not in ("channel", "group"):
        raise ConfigError(f"SSZ is for symmetric integers by channel or group, not for {grid}: use minmax")
