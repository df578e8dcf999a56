"""SSZ: the scale of least squared error for each row or group, by turns with the codes (Lloyd-Max on an even grid).

    q = clamp(round(w / s), quant_min, quant_max)            the best codes for a scale
    s = sum_k h_k w_k q_k / sum_k h_k q_k^2             the best scale for codes, h = 1 or what the inputs weigh

Each step lowers the error, down to a local minimum that depends on the start. `ssz_upstream` is msModelSlim's
(`core/quantizer/impl/ssz.py`): one start, at min-max's scale. `ssz` tries many starts, keeps the best and follows that
one until its codes stay; it reaches what a grid of a hundred scales reaches, with a third of the passes.

Asymmetric grids have an offset as well, a whole number, found in turn with the other two (`ssz_asymmetric`):

    q = clamp(round(w / s + o), quant_min, quant_max)   s = sum h w (q - o) / sum h (q - o)^2   o = mean_h(q - w / s)

h_k = E[x_k^2] makes it the error of the output for inputs that do not correlate (the diagonal of GPTQ's Hessian).
"""

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.kernels.ssz import ssz as many_starts
from glm5.quant.chunks import chunks, stacked, wide
from glm5.quant.minmax import as_groups, minmax
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
    for some, rows in chunks(flat := stacked(weight)):
        h = None if importance is None else _importance(importance, grid, some, weight)
        stacked(scale)[some, rows] = many_starts(
            as_groups(flat[some, rows], grid),
            h,
            quant_min=grid.quant_min,
            quant_max=grid.quant_max,
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


def ssz_asymmetric(
    weight: Tensor,
    grid: Grid,
    importance: Tensor | None = None,
    *,
    starts: tuple[float, ...] = STARTS,
    steps: int = 2,
    polish: int = 10,
) -> tuple[Tensor, Tensor]:
    """(scale, offset) of an asymmetric `grid` for weight [..., O, I]: as `ssz`, from shares of min-max's range."""
    _refuse(grid, symmetric=False)
    first, offset = minmax(weight, grid)
    assert offset is not None
    scale = torch.empty_like(first)
    for some, rows in chunks(flat := stacked(weight)):
        h = None if importance is None else _importance(importance, grid, some, weight).unsqueeze(1)
        w = as_groups(wide(flat[some, rows]), grid)
        best = _Range(w, torch.ones_like(w) if h is None else h.expand_as(w), grid)
        one, middle = stacked(first)[some, rows], _middle(w)
        best.consider(one, stacked(offset)[some, rows])
        for start in starts:
            s = one * start
            o = (0.5 * (grid.quant_min + grid.quant_max) - middle / s).round_().clamp_(grid.quant_min, grid.quant_max)
            for _ in range(steps):
                s, o = best.consider(*best.step(s, o))
        for _ in range(polish):
            best.consider(*best.step(best.scale, best.offset))
        stacked(scale)[some, rows], stacked(offset)[some, rows] = best.scale, best.offset
    return scale, offset


def _middle(w: Tensor) -> Tensor:
    """Of the range of w [..., g] with 0 in it."""
    return 0.5 * (w.amax(-1).clamp_min(0) + w.amin(-1).clamp_max(0))


class _Range:
    """The best scale and offset so far of groups w [..., g] under weights h."""

    def __init__(self, w: Tensor, h: Tensor, grid: Grid) -> None:
        self.w, self.h, self.grid = w, h, grid
        self.scale, self.offset = torch.ones_like(w[..., 0]), torch.zeros_like(w[..., 0])
        self.least = torch.full_like(self.scale, torch.inf)

    def consider(self, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        wrong = self.w - scale.unsqueeze(-1) * (self._codes(scale, offset) - offset.unsqueeze(-1))
        error = (self.h * wrong.square_()).sum(-1)
        better = error < self.least
        self.least = torch.where(better, error, self.least)
        self.scale, self.offset = torch.where(better, scale, self.scale), torch.where(better, offset, self.offset)
        return scale, offset

    def step(self, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        q = self._codes(scale, offset)
        size = self.h.sum(-1).clamp_min(_NOTHING)
        offset = ((self.h * (q - self.w / scale.unsqueeze(-1))).sum(-1) / size).round_()
        offset = offset.clamp_(self.grid.quant_min, self.grid.quant_max)  # so that 0 has a code
        moved = q - offset.unsqueeze(-1)
        found = (self.h * self.w * moved).sum(-1) / (self.h * moved.square()).sum(-1).clamp_min_(_NOTHING)
        return torch.where(found > 0, found, scale), offset

    def _codes(self, scale: Tensor, offset: Tensor) -> Tensor:
        near = (self.w / scale.unsqueeze(-1) + offset.unsqueeze(-1)).round_()
        return near.clamp_(self.grid.quant_min, self.grid.quant_max)


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
    return (w / scale.unsqueeze(-1)).round_().clamp_(grid.quant_min, grid.quant_max)


def _importance(importance: Tensor, grid: Grid, some: slice, weight: Tensor) -> Tensor:
    """h [..., I] for some matrices of the stack, by groups: [b, G, g], or [1, G, g] for all."""
    h = wide(importance.to(weight.device)).reshape(-1, 1, importance.shape[-1])
    return as_groups(h[some] if len(h) > 1 else h, grid).squeeze(1)


def _refuse(grid: Grid, *, symmetric: bool = True) -> None:
    if grid.kind != "int" or grid.symmetric != symmetric or grid.scope not in ("channel", "group"):
        kind = "symmetric" if symmetric else "asymmetric"
        raise ConfigError(f"SSZ is for {kind} integers by channel or group here, not for {grid}: use minmax")
