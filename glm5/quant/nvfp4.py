"""NVFP4: e2m1 codes, an e4m3 scale for each group of 16, and a float32 scale for the tensor.

    tensor_scale = max|x| / (6 * 448)      scale = e4m3(max|group| / (6 tensor_scale))      code = nearest e2m1

Codes are rounded with the scale as it is stored. Source: ModelOpt. Its files store these two scales; those of
compressed-tensors store the reciprocal of tensor_scale.
"""

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8, FP8_MAX
from glm5.quant.chunks import chunks, stacked, wide
from glm5.quant.record import E2M1, Grid, Quantized

_MIN_SCALE = (
    2.0**-9
)  # e4m3's smallest number: a scale of 0 would lose the group's sign and, in some kernels, divide by it


def quantize_nvfp4(x: Tensor, grid: Grid, tensor_scale: Tensor | None = None) -> Quantized:
    """Quantize x [..., O, I] to nvfp4. `tensor_scale` [..., 1, 1]: for tensors that must share one (gate and up)."""
    shape = grid.scale_shape(x.shape)
    if tensor_scale is None:
        amplitude = wide(torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True)))
        tensor_scale = amplitude / torch.full_like(amplitude, E2M1[-1] * FP8_MAX)
        tensor_scale = tensor_scale.masked_fill(tensor_scale == 0, 1.0)
    scale = torch.empty(shape, dtype=tensor_scale.dtype, device=x.device)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    for batch, rows in chunks(flat := stacked(x)):
        groups = wide(flat[batch, rows]).unflatten(-1, (shape[-1], -1))
        batch_scale = stacked(tensor_scale)[batch]
        group_scale = groups.abs().amax(-1) / (torch.full_like(batch_scale, E2M1[-1]) * batch_scale)
        group_scale = group_scale.clamp_(_MIN_SCALE, FP8_MAX).to(FP8).to(scale.dtype)
        stacked(scale)[batch, rows] = group_scale
        stacked(codes)[batch, rows] = _codes(groups / (group_scale * batch_scale).unsqueeze(-1)).flatten(-2)
    return Quantized(grid, codes, scale, tensor_scale=tensor_scale)


def _codes(x: Tensor) -> Tensor:
    """The nearest e2m1 codes, 0 to 7, plus 8 where negative. Ties go to the even code, as in IEEE 754."""
    levels = torch.tensor(E2M1, dtype=x.dtype, device=x.device)
    middles = (levels[1:] + levels[:-1]) / 2
    size = x.abs()
    low = torch.bucketize(size, middles)  # a tie gives the smaller code
    odd_tie = (low % 2 == 1) & (size == middles[low.clamp_max(len(middles) - 1)])
    return ((low + odd_tie) + 8 * (x < 0)).to(torch.int8)
