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
from glm5.quant.minmax import encode, minmax
from glm5.quant.record import Grid, Quantized

GROUP = 128
KEY = "quantization_aware"
"""Key of config.json that marks a checkpoint of quantization-aware training."""

_MIN_SCALE = 1e-5


def int4(weight: Tensor, group: int = GROUP) -> Quantized:
    """Quantize weight [..., O, I] in groups along I. Scales are bfloat16 values, held in float32."""
    grid = Grid("int", 4, "group", group)
    scale = torch.empty(grid.scale_shape(weight.shape), dtype=torch.float32, device=weight.device)
    for batch, rows in chunks(flat := stacked(weight)):
        amplitude = wide(flat[batch, rows]).unflatten(-1, (-1, group)).abs().amax(-1)
        group_scale = (amplitude / torch.full_like(amplitude, grid.quant_max)).clamp_min_(_MIN_SCALE)
        stacked(scale)[batch, rows] = group_scale.to(torch.bfloat16).float()
    return Quantized(grid, encode(weight, grid, scale), scale)


def minmax_scale(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """(scale, offset) of `grid` for weight [..., O, I] by min-max; groups of int4 are as training has them."""
    if grid.kind == "int" and grid.bits == 4 and grid.scope == "group" and grid.group is not None and grid.symmetric:
        return int4(weight, grid.group).scale, None
    return minmax(weight, grid)


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
