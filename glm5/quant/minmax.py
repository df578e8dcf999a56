"""Min-max scales, and codes for given scales.

    symmetric     s = max|x| / quant_max                  code = clamp(round(x / s), quant_min, quant_max)
    asymmetric    s = (max - min) / (2^b - 1)           o = round(-min / s) + quant_min
                                                        code = clamp(round(x / s + o), quant_min, quant_max)

quant_max is 7 for 4 bits, 127 for 8, 448 for e4m3; fp8 codes are rounded to e4m3 instead. As msModelSlim (`ir/`) with
two differences. The asymmetric range always includes 0, so that an offset is itself a code. The scale of an all-zero
group is 1; msModelSlim clamps scales to float32's epsilon, which loses rows of small numbers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.common.errors import ConfigError
from glm5.kernels.block_scaled import FP8
from glm5.quant.chunks import chunks, stacked, wide
from glm5.quant.nvfp4 import quantize_nvfp4
from glm5.quant.record import Grid, Quantized


def as_groups(x: Tensor, grid: Grid) -> Tensor:
    """x [..., O, I] with the elements that share a scale in the last dimension: [*grid.scale_shape, elements]. Blocks
    are padded with zeros at the edges."""
    shape = grid.scale_shape(x.shape)
    if grid.scope == "tensor":
        return x.reshape(*shape, -1)
    if grid.scope != "block":
        return x.unflatten(-1, (shape[-1], -1))
    size = grid.group or 0
    pad = (0, shape[-1] * size - x.shape[-1], 0, shape[-2] * size - x.shape[-2])
    return F.pad(x, pad).unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).transpose(-3, -2).flatten(-2)


def minmax(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """(scale, offset) of `grid` for x [..., O, I], float32 (float64 for float64). The offset is None if symmetric."""
    scale = torch.empty(grid.scale_shape(x.shape), dtype=wide(x[..., :0]).dtype, device=x.device)
    offset = None if grid.symmetric else torch.empty_like(scale)
    for batch, rows, scale_rows in _chunks(x, grid):
        groups = as_groups(wide(stacked(x)[batch, rows]), grid)
        minimum, maximum = groups.amin(-1).clamp_max_(0), groups.amax(-1).clamp_min_(0)
        amplitude = torch.maximum(maximum, -minimum) if offset is None else maximum - minimum
        # The divisor is a tensor: for a Python number, torch on CUDA multiplies with the rounded reciprocal instead.
        step = amplitude / torch.full_like(
            amplitude, grid.quant_max if offset is None else grid.quant_max - grid.quant_min
        )
        step.masked_fill_(step == 0, 1.0)
        stacked(scale)[batch, scale_rows] = step
        if offset is not None:
            stacked(offset)[batch, scale_rows] = (-minimum / step).round_() + grid.quant_min
    return scale, offset


def encode(x: Tensor, grid: Grid, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """The nearest codes of x [..., O, I] for the given scale: int8, or float8_e4m3fn for kind "fp8".

    Raises ConfigError for nvfp4, which has two scales: use `quantize`.
    """
    if grid.kind == "nvfp4":
        raise ConfigError("codes of nvfp4 come from quantize: it has two scales")
    codes = torch.empty(x.shape, dtype=FP8 if grid.kind == "fp8" else torch.int8, device=x.device)
    for batch, rows, scale_rows in _chunks(x, grid):
        offset_OG = None if offset is None else stacked(offset)[batch, scale_rows]
        stacked(codes)[batch, rows] = nearest(
            wide(stacked(x)[batch, rows]), grid, stacked(scale)[batch, scale_rows], offset_OG
        )
    return codes


def nearest(x: Tensor, grid: Grid, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """The nearest codes of x [..., O, I], in the dtype of x. `scale` and `offset` are of `grid.scale_shape`."""
    x = x / grid.broadcast(scale, x.shape)
    if offset is not None:
        x += grid.broadcast(offset, x.shape)
    if grid.kind == "fp8":
        return x.clamp_(grid.quant_min, grid.quant_max).to(FP8).to(x.dtype)
    return x.round_().clamp_(grid.quant_min, grid.quant_max)


def quantize(x: Tensor, grid: Grid, scale: Tensor | None = None, offset: Tensor | None = None) -> Quantized:
    """Quantize x [..., O, I] to `grid` with the given scale, or else the min-max scale. nvfp4 takes no scale."""
    if grid.kind == "nvfp4":
        return quantize_nvfp4(x, grid)
    if scale is None:
        scale, offset = minmax(x, grid)
    return Quantized(grid, encode(x, grid, scale, offset), scale, offset)


def fake_quantize(x: Tensor, grid: Grid | None, scale: Tensor | None = None) -> Tensor:
    """Quantize and dequantize x [..., T, I], in its dtype; x itself where `grid` is None. A vector is one row."""
    if grid is None:
        return x
    if x.dim() == 1:
        return fake_quantize(x.unsqueeze(0), grid, scale).squeeze(0)
    if grid.kind == "nvfp4" or not grid.symmetric or x.dtype not in (torch.float32, torch.float64):
        return quantize(x, grid, scale).dequantize(x.dtype)
    # A code has at most 8 bits, so its product with a scale is rounded once, as in `dequantize`.
    scale = minmax(x, grid)[0] if scale is None else scale
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for batch, rows, scale_rows in _chunks(x, grid):
        part, each = stacked(x)[batch, rows], stacked(scale)[batch, scale_rows]
        stacked(out)[batch, rows] = nearest(part, grid, each).mul_(grid.broadcast(each, part.shape))
    return out


def _chunks(x: Tensor, grid: Grid) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of a stack along its matrices and rows, and the matching slice of rows of the scale."""
    flat = stacked(x)
    unit = {"block": grid.group or 1, "tensor": max(1, flat.shape[1])}.get(grid.scope, 1)
    for batch, rows in chunks(flat, unit):
        yield batch, rows, slice(rows.start // unit, -(-rows.stop // unit))
