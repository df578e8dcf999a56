"""INT4 of quantization-aware training: one function for the fake quantization in training and for the export.

    scale = bf16(max(max|group| / 7, 1e-5))      code = round(w / scale)      w' = scale * code, rounded to w's dtype

The scale is rounded before the codes are computed, so the stored values are those of training. The largest weight of a
group has code 7 or -7, so quantizing w' gives the same codes and scale again: the export does not change the trained
weights. No other method has that property, so none may be used on such a checkpoint. Source: GLM-5's report
(arXiv 2602.15763), section 2.4.3; slime.
"""

from typing import Any

import torch
from torch import Tensor

from glm5.quant.chunks import chunks, stacked, wide
from glm5.quant.minmax import as_groups, encode, minmax, nearest
from glm5.quant.record import Grid, Quantized

GROUP = 128
KEY = "quantization_aware"
"""Key of config.json that marks a checkpoint of quantization-aware training."""

_MIN_SCALE = 1e-5


def int4(weight: Tensor, group: int = GROUP) -> Quantized:
    """Quantize weight [..., O, I] in groups along I. Scales are bfloat16 values, held in float32."""
    grid = Grid("int", 4, "group", group)
    scale = _group_scale(weight, grid, grid.quant_max)
    return Quantized(grid, encode(weight, grid, scale), scale)


def _group_scale(weight: Tensor, grid: Grid, reach: float) -> Tensor:
    """bf16(max(max|group| / reach, 1e-5)), held in float32."""
    scale = torch.empty(grid.scale_shape(weight.shape), dtype=torch.float32, device=weight.device)
    for batch, rows in chunks(flat := stacked(weight)):
        amplitude = wide(flat[batch, rows]).unflatten(-1, (-1, grid.group or 1)).abs().amax(-1)
        group_scale = (amplitude / torch.full_like(amplitude, reach)).clamp_min_(_MIN_SCALE)
        stacked(scale)[batch, rows] = group_scale.to(torch.bfloat16).float()
    return scale


def minmax_scale(weight: Tensor, grid: Grid, *, trained: bool = False) -> tuple[Tensor, Tensor | None]:
    """(scale, offset) of `grid` for weight [..., O, I] by min-max; groups of int4 are as training has them.

    Symmetric int4 has one negative code more: of max|w| / 7 and max|w| / 7.5 (compressed-tensors), each row or group
    takes the scale whose codes have the less squared error. What training has left on the grid keeps the first, which
    loses nothing. `trained`: all take the first, as training does with weights off the grid.
    """
    if grid.kind != "int" or grid.bits != 4 or not grid.symmetric or grid.scope not in ("channel", "group"):
        return minmax(weight, grid)
    first, second = grid.quant_max, grid.quant_max + 0.5
    scale = minmax(weight, grid)[0] if grid.group is None else _group_scale(weight, grid, first)
    if trained:
        return scale, None
    finer = scale * (first / second) if grid.group is None else _group_scale(weight, grid, second)
    is_better = _squared_error(weight, grid, finer) < _squared_error(weight, grid, scale)
    return torch.where(is_better, finer, scale), None


def _squared_error(weight: Tensor, grid: Grid, scale: Tensor) -> Tensor:
    """Of the nearest codes, by row or group: of the shape and dtype of `scale`."""
    found = torch.empty_like(scale)
    for batch, rows in chunks(flat := stacked(weight)):
        part, each = wide(flat[batch, rows]), stacked(scale)[batch, rows]
        error = nearest(part, grid, each).mul_(grid.broadcast(each, part.shape)).sub_(part).square_()
        stacked(found)[batch, rows] = as_groups(error, grid).sum(-1)
    return found


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: int, stored: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        return int4(weight.to(stored), group).dequantize(stored).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ARG004 - its name is the base class's
        return *grad_outputs, None, None


def fake_int4(weight: Tensor, group: int = GROUP, *, stored: torch.dtype | None = None) -> Tensor:
    """Quantize weight [..., O, I] with `int4` and dequantize it, in its dtype; the gradient is straight-through.

    `stored`: the dtype of the weight in checkpoints, to which it is rounded before `int4`; by default its own.
    """
    return _StraightThrough.apply(weight, group, weight.dtype if stored is None else stored)


def is_int4(weight: Tensor, group: int = GROUP) -> bool:
    """Whether `int4` leaves the weight unchanged, as after quantization-aware training. False for all zeros, and where
    rows do not divide into groups."""
    if weight.shape[-1] % group or not weight.any():
        return False
    return bool(torch.equal(int4(weight.detach(), group).dequantize(weight.dtype), weight.detach()))
