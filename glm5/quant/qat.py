"""INT4 as training with fake quantization sees it, and as the exporter writes it: one function for both.

    scale = bf16(max(max|group| / 7, 1e-5))      code = round(w / scale)      w' = scale * code, rounded to w's dtype

The scale is rounded before codes are made, so what is stored is what was trained with. The largest of a group becomes
7 or -7, so w' gives the same codes and scale again: a checkpoint after such training passes unchanged. (No other method
has that property, and none may be used on it.) Source: GLM-5's report (arXiv 2602.15763), section 2.4.3; slime.
"""

from typing import Any

import torch
from torch import Tensor

from glm5.quant.chunks import chunks, stacked, wide
from glm5.quant.minmax import encode
from glm5.quant.record import Grid, Quantized

GROUP = 128
KEY = "quantization_aware"
"""In config.json of a checkpoint after such training."""

_LEAST = 1e-5


def int4(weight: Tensor, group: int = GROUP) -> Quantized:
    """weight [..., O, I] in groups along I. The scale is held in float32 and is a bfloat16 value."""
    grid = Grid("int", 4, "group", group)
    scale = torch.empty(grid.scale_shape(weight.shape), dtype=torch.float32, device=weight.device)
    for some, rows in chunks(flat := stacked(weight)):
        reach = wide(flat[some, rows]).unflatten(-1, (-1, group)).abs().amax(-1)
        each = (reach / torch.full_like(reach, grid.quant_max)).clamp_min_(_LEAST)
        stacked(scale)[some, rows] = each.to(torch.bfloat16).float()
    return Quantized(grid, encode(weight, grid, scale), scale)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: int, stored: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        return int4(weight.to(stored), group).dequantize(stored).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ARG004 - its name is the base class's
        return *grad_outputs, None, None


def fake_int4(weight: Tensor, group: int = GROUP, *, stored: torch.dtype | None = None) -> Tensor:
    """What `int4` leaves of weight [..., O, I], in its dtype. The gradient passes as if nothing had been done.

    `stored`: the dtype that a checkpoint will hold it in, where that is another; int4 then sees it in that.
    """
    return _StraightThrough.apply(weight, group, weight.dtype if stored is None else stored)


def is_int4(weight: Tensor, group: int = GROUP) -> bool:
    """Whether `int4` changes nothing: true of a weight that was trained with it, and stored as it was seen. Zeros, and
    rows that have no such groups, tell nothing."""
    if weight.shape[-1] % group or not weight.any():
        return False
    return bool(torch.equal(int4(weight.detach(), group).dequantize(weight.dtype), weight.detach()))
