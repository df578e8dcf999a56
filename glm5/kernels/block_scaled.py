"""FP8 weights with one scale per 128 x 128 block: w[o, i] = data[o, i] * scale[o // 128, i // 128].

Blocks at the right and lower edge may be ragged: 576 rows have 5 scale rows, the last for 64 rows. The checkpoint
calls the scale `weight_scale_inv`, but it is a factor, not an inverse (model spec 2).
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_CHUNK = 1 << 22  # elements dequantized at a time, because all experts of a layer would not fit in memory


def num_blocks(size: int) -> int:
    """Blocks that cover `size` rows or columns."""
    return -(-size // BLOCK)


class BlockScaled(NamedTuple):
    """A quantized weight: float8_e4m3fn data [..., O, I] and float32 scale [..., ceil(O/128), ceil(I/128)]."""

    data: Tensor
    scale: Tensor

    def check(self) -> Self:
        """Itself. Raises ValueError if dtypes or shapes do not match."""
        *lead, rows, cols = self.data.shape
        want = (*lead, num_blocks(rows), num_blocks(cols))
        if tuple(self.scale.shape) != want or self.data.dtype != FP8 or self.scale.dtype != torch.float32:
            raise ValueError(
                f"BlockScaled: data {list(self.data.shape)} {self.data.dtype} needs float8_e4m3fn and a float32 scale "
                f"{list(want)}, got {list(self.scale.shape)} {self.scale.dtype}"
            )
        return self

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The exact product data * scale, rounded once to `dtype`."""
        self.check()
        rows, cols = self.data.shape[-2:]
        out = torch.empty(self.data.shape, dtype=dtype, device=self.data.device)
        step = max(1, _CHUNK // (BLOCK * cols)) * BLOCK
        for data, scale, into in zip(
            self.data.reshape(-1, rows, cols),
            self.scale.reshape(-1, *self.scale.shape[-2:]),
            out.view(-1, rows, cols),
            strict=True,
        ):
            for row in range(0, rows, step):
                part = data[row : row + step]
                scale_OI = expand_scale(scale[row // BLOCK : (row + step) // BLOCK], part.shape[0], cols)
                into[row : row + step] = _rounded_product(part, scale_OI, dtype)
        return out

    def split_gate_up(self) -> tuple["BlockScaled", "BlockScaled"]:
        """Gate and up halves [..., F, D] of stacked rows [..., 2F, D], each with a block grid of its own.

        The scale has 2 * ceil(F/128) rows, gate's first; where 128 divides F that is also the grid of the stack.
        """
        return BlockScaled(*(t.chunk(2, dim=-2)[0] for t in self)), BlockScaled(*(t.chunk(2, dim=-2)[1] for t in self))


def expand_scale(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Scale of every element, [rows, cols]: each of [ceil(rows/128), ceil(cols/128)] repeated, the last cut."""
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]


def _rounded_product(data: Tensor, scale_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """data * scale rounded once to `dtype`, like `round_once` of the float64 product and several times faster.

    Both factors are exact in float32, so a float32 product is rounded once. Casting it to bfloat16 is wrong only at the
    midpoint of two bfloat16 values, where the exact product may be slightly off the midpoint.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return round_once(data.double() * scale_OI.double(), dtype)
    wide = data.float()
    product = wide * scale_OI
    if dtype == torch.float32:
        return product
    rounded = product.to(dtype)
    midpoint = (product.view(torch.int32) & 0xFFFF) == 0x8000
    rounded[midpoint] = round_once(wide[midpoint].double() * scale_OI[midpoint].double(), dtype)
    return rounded


def round_once(exact_f64: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to `dtype`, to nearest even, rounded a single time.

    torch casts float64 to a 16-bit type through float32, which rounds twice and may give the wrong neighbour. Rounding
    float64 to odd in float32 first is exact: the last bit records on which side of a midpoint the value was.
    """
    if dtype in (torch.float64, torch.float32):
        return exact_f64.to(dtype)
    near = exact_f64.float()
    bits = near.view(torch.int32)
    bits = bits - (near.double().abs() > exact_f64.abs()).int()  # sign-magnitude: minus one is towards zero
    odd = torch.where(near.double() == exact_f64, bits, bits | 1)
    return odd.view(torch.float32).to(dtype)


def divided(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once. With a plain number, torch on CUDA would multiply by the rounded reciprocal."""
    return x / torch.full_like(x, divisor)


def quantize_blocks(weight: Tensor) -> BlockScaled:
    """`weight` [..., O, I] in FP8: scale = amax / 448 of each block (1 for a block of zeros), data to nearest even."""
    rows, cols = weight.shape[-2:]
    pad = (0, num_blocks(cols) * BLOCK - cols, 0, num_blocks(rows) * BLOCK - rows)
    blocks = torch.nn.functional.pad(weight.float(), pad).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    amax = blocks.abs().amax(dim=(-3, -1))
    scale = divided(amax, FP8_MAX)
    scale = scale.masked_fill(scale == 0, 1.0)
    data = (blocks / scale[..., :, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    data = data.flatten(-4, -3).flatten(-2)[..., :rows, :cols]
    return BlockScaled(data.contiguous(), scale)
