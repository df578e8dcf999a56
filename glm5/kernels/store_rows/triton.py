"""store_rows on a GPU, in Triton: one program per row. `put_*` are for kernels that also compute the row."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.block_scaled import BLOCK, FP8, num_blocks
from glm5.kernels.fp8_pool import ROPE_DTYPE, Fp8Keys, Fp8Latents, Pool
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait, quantized_row, quotient
from glm5.kernels.triton_support import dependent_launch


class PoolTensors(NamedTuple):
    """The tensors of a pool's parts; missing parts repeat the first one."""

    values: Tensor
    scales: Tensor
    rope: Tensor

    @classmethod
    def of(cls, pool_PZX: Pool) -> "PoolTensors":
        """Of any pool with contiguous rows; raises ValueError for others."""
        if isinstance(pool_PZX, Fp8Keys):
            return cls(pool_PZX.data, pool_PZX.scale, pool_PZX.data)
        if isinstance(pool_PZX, Fp8Latents):
            row, form = pool_PZX
            scales = row[..., form.scales_at : form.rope_at].view(torch.float32)
            rope = row[..., form.rope_at : form.num_bytes].view(ROPE_DTYPE)
            return cls(row[..., : form.scales_at].view(FP8), scales, rope)
        if pool_PZX.stride(2) != 1:
            raise ValueError(f"store_rows[triton] needs rows in one piece, got a pool with strides {pool_PZX.stride()}")
        return cls(pool_PZX, pool_PZX, pool_PZX)

    def strides(self) -> tuple[int, int, int, int, int, int]:
        """From page to page and from row to row, of each part, in its elements."""
        values, scales, rope = ((part.stride(0), part.stride(1)) for part in self)
        return *values, *scales, *rope


@triton.jit
def put_plain(row, x, parts, page, slot, WIDTH: tl.constexpr):
    """Values `row` at columns `x` of a pool in their dtype, or another plain one."""
    values_ptr, _, _, page_stride, row_stride, _, _, _, _ = parts
    at = values_ptr + page * page_stride + slot * row_stride + x
    tl.store(at, row.to(values_ptr.dtype.element_ty), mask=x < WIDTH)


@triton.jit
def put_fp8_key(row, x, parts, page, slot, WIDTH: tl.constexpr):
    """An index key in float32: the scale is the smallest power of two that is large enough."""
    values_ptr, scales_ptr, _, page_stride, row_stride, scale_page_stride, scale_row_stride, _, _ = parts
    amax = tl.maximum(tl.max(tl.abs(row), axis=0), 1e-4)
    least = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    # Up to a power of two: a carry out of the 23 bits of the fraction, which are then cut off.
    scale = ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    wide = tl.broadcast_to(scale, row.shape)
    data = quotient(row, wide, tl.div_rn(tl.full(row.shape, 1.0, tl.float32), wide))
    tl.store(values_ptr + page * page_stride + slot * row_stride + x, data, mask=x < WIDTH)
    tl.store(scales_ptr + page * scale_page_stride + slot * scale_row_stride, scale)


@triton.jit
def put_fp8_latent(values, c, rope, r, parts, page, slot, C: tl.constexpr, R: tl.constexpr):
    """Values in float32, zeros behind the C that are there, and the rotated part; padding is zeros."""
    values_ptr, scales_ptr, rope_ptr, page_stride, row_stride = parts[0], parts[1], parts[2], parts[3], parts[4]
    data, scale = quantized_row(values)
    g = tl.arange(0, scale.shape[0])
    tl.store(values_ptr + page * page_stride + slot * row_stride + c, data, mask=c < (C + 3) // 4 * 4)
    tl.store(scales_ptr + page * parts[5] + slot * parts[6] + g, scale, mask=g < (C + 127) // 128)
    at = rope_ptr + page * parts[7] + slot * parts[8] + r
    tl.store(at, rope.to(rope_ptr.dtype.element_ty), mask=r < (R + 1) // 2 * 2)


@triton.jit
def _store(
    row_ptr,
    slot_ptr,
    values_ptr,
    scales_ptr,
    rope_ptr,
    page_stride,
    row_stride,
    scale_page_stride,
    scale_row_stride,
    rope_page_stride,
    rope_row_stride,
    stride,
    C: tl.constexpr,
    R: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    t, c, r = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    pdl_wait(PDL)
    slot = tl.load(slot_ptr + t).to(tl.int64)
    page, slot = slot // Z, slot % Z
    row = tl.load(row_ptr + t * stride + c, mask=c < C, other=0.0)
    strides = page_stride, row_stride, scale_page_stride, scale_row_stride, rope_page_stride, rope_row_stride
    parts = (values_ptr, scales_ptr, rope_ptr) + strides
    if KIND == "plain":
        put_plain(row, c, parts, page, slot, C)
    elif KIND == "key":
        put_fp8_key(row.to(tl.float32), c, parts, page, slot, C)
    else:
        rope = tl.load(row_ptr + t * stride + C + r, mask=r < R, other=0.0)
        put_fp8_latent(row.to(tl.float32), c, rope, r, parts, page, slot, C, R)
    pdl_launch_dependents(PDL)


def kind_of(pool_PZX: Pool) -> str:
    """How a kernel writes rows of a pool."""
    return "key" if isinstance(pool_PZX, Fp8Keys) else "latent" if isinstance(pool_PZX, Fp8Latents) else "plain"


def store_rows(pool_PZX: Pool, slot_T: Tensor, row_TX: Tensor) -> None:
    """As `reference.store_rows`, bit for bit. Raises ValueError for rows that are not in one piece."""
    parts, kind = PoolTensors.of(pool_PZX), kind_of(pool_PZX)
    row_TX = row_TX.detach()
    row_TX = row_TX if row_TX.stride(-1) == 1 else row_TX.contiguous()
    num_values = pool_PZX.format.num_values if isinstance(pool_PZX, Fp8Latents) else row_TX.shape[1]
    if not len(slot_T):
        return
    _store[(len(slot_T),)](
        row_TX,
        slot_T,
        *parts,
        *parts.strides(),
        row_TX.stride(0),
        C=num_values,
        R=row_TX.shape[1] - num_values,
        Z=pool_PZX.shape[1],
        BLOCK_C=triton.next_power_of_2(num_blocks(num_values) * BLOCK),
        BLOCK_R=max(2, triton.next_power_of_2(row_TX.shape[1] - num_values + 1)),
        KIND=kind,
        num_warps=1 if num_values <= 2 * BLOCK else 2,
        **dependent_launch(row_TX.device),
    )
