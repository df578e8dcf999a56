"""NVFP4: e2m1 codes, an e4m3 scale for 16 neighbours, and one float32 for the tensor.

    tensor_scale = max|x| / (6 * 448)      scale = e4m3(max|group| / (6 tensor_scale))      code = nearest e2m1

Codes are rounded for the scale as it is stored. ModelOpt's formula; its files store these two, compressed-tensors'
the reciprocal of tensor_scale.
"""

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8, FP8_MAX
from glm5.quant.chunks import chunks, stacked, wide
from glm5.quant.record import E2M1, Grid, Quantized

_LEAST = 2.0**-9  # e4m3's smallest number: a scale of 0 would lose the group's sign and, in some kernels, divide by it


def quantize_nvfp4(x: Tensor, grid: Grid, tensor_scale: Tensor | None = None) -> Quantized:
    """x [..., O, I] on nvfp4. `tensor_scale` [..., 1, 1] where several tensors have to share one (gate and up)."""
    shape = grid.scale_shape(x.shape)
    if tensor_scale is None:
        reach = wide(torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True)))
        tensor_scale = reach / torch.full_like(reach, E2M1[-1] * FP8_MAX)
        tensor_scale = tensor_scale.masked_fill(tensor_scale == 0, 1.0)
    scale = torch.empty(shape, dtype=tensor_scale.dtype, device=x.device)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    for some, rows in chunks(flat := stacked(x)):
        groups = wide(flat[some, rows]).unflatten(-1, (shape[-1], -1))
        of_tensor = stacked(tensor_scale)[some]
        each = groups.abs().amax(-1) / (torch.full_like(of_tensor, E2M1[-1]) * of_tensor)
        each = each.clamp_(_LEAST, FP8_MAX).to(FP8).to(scale.dtype)
        stacked(scale)[some, rows] = each
        stacked(codes)[some, rows] = _codes(groups / (each * of_tensor).unsqueeze(-1)).flatten(-2)
    return Quantized(grid, codes, scale, tensor_scale=tensor_scale)


def _codes(x: Tensor) -> Tensor:
    """The nearest e2m1, ties to the even code, as e4m3 and IEEE round: 0 to 7, plus 8 where negative."""
    levels = torch.tensor(E2M1, dtype=x.dtype, device=x.device)
    middles = (levels[1:] + levels[:-1]) / 2
    size = x.abs()
    low = torch.bucketize(size, middles)  # a middle itself goes to the smaller code,
    odd = (low % 2 == 1) & (size == middles[low.clamp_max(len(middles) - 1)])  # which must be even
    return ((low + odd) + 8 * (x < 0)).to(torch.int8)
