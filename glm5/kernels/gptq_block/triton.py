"""gptq_block in one launch: a program holds some rows of the block in registers for all of its columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


@triton.jit
def _gptq_block(
    w_ptr,
    factor_ptr,
    scale_ptr,
    codes_ptr,
    errors_ptr,
    O,
    K,
    w_stack,
    w_row,
    factor_stack,
    factor_row,
    scale_stack,
    scale_row,
    scale_step,
    quant_min,
    quant_max,
    E4M3: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)
    there, inside = row < O, (row < O)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + b * w_stack + row[:, None] * w_row + k[None, :], mask=inside, other=0.0)
    codes = tl.zeros([ROWS, WIDTH], tl.float32)
    errors = tl.zeros([ROWS, WIDTH], tl.float32)
    factor_ptr += b * factor_stack
    scale_ptr += b * scale_stack + row * scale_row
    for at in range(K):
        here = k == at
        column = tl.sum(tl.where(here[None, :], w, 0.0), 1)
        scale = tl.load(scale_ptr + at * scale_step, mask=there, other=1.0)
        factor = tl.load(factor_ptr + at * factor_row + k, mask=(k >= at) & (k < K), other=0.0)
        diagonal = tl.load(factor_ptr + at * factor_row + at)
        near = tl.minimum(tl.maximum(tl.div_rn(column, scale), quant_min), quant_max)
        # Adding 1.5 * 2^23 rounds to nearest even.
        near = near.to(tl.float8e4nv).to(tl.float32) if E4M3 else (near + 12582912.0) - 12582912.0
        error = tl.div_rn(column - near * scale, tl.broadcast_to(diagonal, column.shape))
        w -= error[:, None] * factor[None, :]
        codes = tl.where(here[None, :], near[:, None], codes)
        errors = tl.where(here[None, :], error[:, None], errors)
    at = b * O * K + row[:, None] * K + k[None, :]
    tl.store(codes_ptr + at, codes, mask=inside)
    tl.store(errors_ptr + at, errors, mask=inside)


def gptq_block(
    w_BOK: Tensor, factor_BKK: Tensor, scale_BOK: Tensor, quant_min: float, quant_max: float, *, fp8: bool
) -> tuple[Tensor, Tensor]:
    """As `reference.gptq_block`; products and differences are one operation here, so a last bit may differ."""
    if w_BOK.dtype != torch.float32:
        raise ValueError(f"gptq_block[triton] computes in float32, got {w_BOK.dtype}: use impl='reference'")
    num_stacks, num_rows, width = w_BOK.shape
    codes, errors = (torch.empty(w_BOK.shape, dtype=torch.float32, device=w_BOK.device) for _ in range(2))
    if w_BOK.stride(-1) != 1 or factor_BKK.stride(-1) != 1:
        raise ValueError("gptq_block[triton] needs contiguous rows")
    _gptq_block[(triton.cdiv(num_rows, _ROWS), num_stacks)](
        w_BOK,
        factor_BKK,
        scale_BOK,
        codes,
        errors,
        num_rows,
        width,
        *w_BOK.stride()[:2],
        *factor_BKK.stride()[:2],
        *scale_BOK.stride()[:2],
        scale_BOK.stride(2) if scale_BOK.shape[-1] > 1 else 0,
        quant_min,
        quant_max,
        E4M3=fp8,
        ROWS=_ROWS,
        WIDTH=triton.next_power_of_2(width),
        num_warps=4,
    )
    return codes, errors
