"""x W^T with block-scaled FP8 weights, read once: three kernels by the number of rows.

    1 row        a matrix-vector product on the ordinary units, in float32
    2..16 rows   matrix units, weights widened to x's dtype, x as it is
    more         FP8 matrix units, x quantized by act_quant

The outputs are the rows of the matrix units' tile ("swapped operands"), tokens its columns: few tokens waste little.
Where a weight has too few rows to keep all multiprocessors loading, columns are split: each split stores a partial sum,
and the last one to arrive adds them up in order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.act_quant.triton import act_quant
from glm5.kernels.block_scaled import BLOCK, BlockScaled, num_blocks
from glm5.kernels.triton_fp8 import (
    last_to_arrive,
    partial_products,
    pdl_launch_dependents,
    pdl_wait,
    repeat_8,
    split_by_16,
    upcast,
)
from glm5.kernels.triton_support import arrivals, dependent_launch

FEW_ROWS = 16  # up to here x is not quantized
_MULTIPROCESSORS = 132  # of an H100 or H200: splits fill them once


@triton.jit
def _vector(
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    O,
    D,
    scale_cols,
    BLOCK_O: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [O] = W x. A program does TILES tiles of BLOCK_O rows, all of them under one row of scales."""
    K: tl.constexpr = GROUPS * 128
    o = tl.program_id(0) * (TILES * BLOCK_O) + tl.arange(0, BLOCK_O)
    g = tl.arange(0, GROUPS)
    k = tl.arange(0, K)
    scale_at = scale_ptr + (tl.program_id(0) * (TILES * BLOCK_O) // 128) * scale_cols + g
    scales = ()
    for step in tl.static_range(STEPS):
        scale = tl.load(scale_at + step * GROUPS, mask=step * GROUPS + g < scale_cols, other=0.0)
        scales = scales + (repeat_8(scale),)
    w = tl.load(w_ptr + tl.minimum(o, O - 1).to(tl.int64)[:, None] * D + k[None, :], mask=(k < D)[None, :], other=0.0)
    pdl_wait(PDL)
    # All on their way before the first is put in order, which takes a barrier.
    loads, xs = (), ()
    for step in tl.static_range(STEPS):
        loads = loads + (tl.load(x_ptr + step * K + k, mask=step * K + k < D, other=0.0),)
    for step in tl.static_range(STEPS):
        xs = xs + (split_by_16(loads[step]),)
    for tile in tl.static_range(TILES):
        sums = tl.zeros([BLOCK_O, K // 16], tl.float32)
        for step in tl.static_range(STEPS):
            now = w
            if step + 1 < STEPS or tile + 1 < TILES:
                row = tl.minimum(o + (step + 1) // STEPS * BLOCK_O, O - 1).to(tl.int64)
                col = (step + 1) % STEPS * K + k
                w = tl.load(w_ptr + row[:, None] * D + col[None, :], mask=(col < D)[None, :], other=0.0)
            sums += partial_products(now, xs[step]) * scales[step][None, :]
        if tile + 1 == TILES:
            pdl_launch_dependents(PDL)
        tl.store(y_ptr + o, tl.sum(sums, 1).to(y_ptr.dtype.element_ty), mask=o < O)
        o += BLOCK_O


@triton.jit
def _finish(sums, y_ptr, partial_ptr, arrivals_ptr, o, t, M, O, SPLIT: tl.constexpr, PDL: tl.constexpr):
    """Stores a tile [BLOCK_O, BLOCK_T] of sums, transposed; of SPLIT programs the last to arrive, after adding up."""
    here = (t < M)[None, :] & (o < O)[:, None]
    at = t.to(tl.int64)[None, :] * O + o[:, None]
    if SPLIT == 1:
        pdl_launch_dependents(PDL)
        tl.store(y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=here)
    else:
        tl.store(partial_ptr + tl.program_id(2) * tl.cast(M, tl.int64) * O + at, sums, mask=here)
        if last_to_arrive(arrivals_ptr, tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), SPLIT):
            total = tl.zeros_like(sums)
            for split in tl.static_range(SPLIT):
                part = partial_ptr + split * tl.cast(M, tl.int64) * O + at
                total += tl.load(part, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def _few(
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    partial_ptr,
    arrivals_ptr,
    M,
    O,
    D,
    scale_cols,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [M, O], x as it is. With 2 warps, or 8 columns, a product's operands come from registers."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, 128)
    steps = tl.cdiv(scale_cols, SPLIT)
    first = tl.program_id(2) * steps
    w_at = w_ptr + tl.minimum(o, O - 1).to(tl.int64)[:, None] * D + i[None, :]
    x_at = x_ptr + t[None, :] * D + i[:, None]
    scale_at = scale_ptr + (tl.program_id(0) * BLOCK_O // 128) * scale_cols
    sums = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    pdl_wait(PDL)
    for block in tl.range(first, min(first + steps, scale_cols), num_stages=STAGES):
        inside = block * 128 + i < D
        w = tl.load(w_at + block * 128, mask=inside[None, :], other=0.0)
        x = tl.load(x_at + block * 128, mask=(t < M)[None, :] & inside[:, None], other=0.0)
        sums += tl.dot(upcast(w, x), x, input_precision="ieee") * tl.load(scale_at + block)
    _finish(sums, y_ptr, partial_ptr, arrivals_ptr, o, t, M, O, SPLIT, PDL)


@triton.jit
def _tiles(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    partial_ptr,
    arrivals_ptr,
    M,
    O,
    D,
    scale_cols,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [M, O] of x in FP8 with a scale [D / 128, M] (column by column)."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, 128)
    steps = tl.cdiv(scale_cols, SPLIT)
    first = tl.program_id(2) * steps
    w_at = w_ptr + tl.minimum(o, O - 1).to(tl.int64)[:, None] * D + i[None, :]
    x_at = x_ptr + tl.minimum(t, M - 1).to(tl.int64)[None, :] * D + i[:, None]
    scale_at = scale_ptr + (tl.program_id(0) * BLOCK_O // 128) * scale_cols
    x_scale_at = x_scale_ptr + t
    sums = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    pdl_wait(PDL)
    for block in tl.range(first, min(first + steps, scale_cols), num_stages=STAGES):
        inside = block * 128 + i < D
        w = tl.load(w_at + block * 128, mask=inside[None, :], other=0.0)
        x = tl.load(x_at + block * 128, mask=inside[:, None], other=0.0)
        scale = tl.load(scale_at + block) * tl.load(x_scale_at + block * M, mask=t < M, other=0.0)
        sums += tl.dot(w, x) * scale[None, :]
    _finish(sums, y_ptr, partial_ptr, arrivals_ptr, o, t, M, O, SPLIT, PDL)


class Tiling(NamedTuple):
    """How a kernel cuts its work: rows of W and tokens of a tile, splits of the columns, warps, stages of loads.

    For one row of x: `split` tiles of a program.
    """

    block_o: int
    block_t: int = 1
    split: int = 1
    warps: int = 4
    stages: int = 4
    quantize: bool = False


def tiling_for(num_tokens: int, rows: int, cols: int, *, quantized: bool) -> Tiling:
    """Without an entry in `kernels/tuned`: what was fastest on an H200 (docs/performance-kernels.md); shapes between
    take the nearest rule.
    """
    blocks = num_blocks(cols)
    if num_tokens == 1:
        return Tiling(block_o=4, split=2 if rows >= 6144 and blocks <= 16 else 1)
    if num_tokens <= FEW_ROWS and not quantized:
        tiles = triton.cdiv(rows, 32)
        split = 1 if tiles >= 192 else max(1, min(blocks // 4, 8, 512 // tiles))
        return Tiling(32, 8 if num_tokens <= 8 else 16, split, warps=2, stages=6 if split == 1 else 4)
    block_t = min(128, max(16, triton.next_power_of_2(num_tokens)))
    programs = triton.cdiv(rows, 64) * triton.cdiv(num_tokens, block_t)
    split = max(1, min(blocks // 4, _MULTIPROCESSORS // programs))
    return Tiling(64, block_t, split, stages=6 if block_t <= 64 else 4, quantize=True)


def fp8_linear(
    x_TD: Tensor,
    weight: BlockScaled,
    quantized: tuple[Tensor, Tensor] | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """[T, O] in x's dtype. `quantized`: what `act_quant` makes of x, where that is known."""
    data, scale = weight.check()
    (num_tokens, cols), rows = x_TD.shape, data.shape[0]
    y_TO = torch.empty(num_tokens, rows, dtype=x_TD.dtype, device=x_TD.device)
    if not num_tokens:
        return y_TO
    if tiling is None and quantized is None:
        tiling = tuned.find(Tiling, "fp8_linear", f"O={rows} D={cols}", num_tokens, x_TD.device)
    tiling = tiling or tiling_for(num_tokens, rows, cols, quantized=quantized is not None)
    data, scale = data.contiguous(), scale.contiguous()
    if num_tokens == 1 and not tiling.quantize:
        _run_vector(x_TD.contiguous(), data, scale, y_TO, tiling)
        return y_TO
    operands = with_column_scale(*(quantized or act_quant(x_TD))) if tiling.quantize else (x_TD.contiguous(),)
    kernel = _tiles if tiling.quantize else _few
    split = tiling.split
    partial = torch.empty(split if split > 1 else 0, num_tokens, rows, dtype=torch.float32, device=x_TD.device)
    grid = (triton.cdiv(rows, tiling.block_o), triton.cdiv(num_tokens, tiling.block_t), split)
    kernel[grid](
        *operands,
        data,
        scale,
        y_TO,
        partial,
        arrivals(x_TD.device),
        num_tokens,
        rows,
        cols,
        num_blocks(cols),
        BLOCK_O=tiling.block_o,
        BLOCK_T=tiling.block_t,
        SPLIT=split,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **dependent_launch(x_TD.device),
    )
    return y_TO


def with_column_scale(x_fp8: Tensor, x_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous codes [T, D], and their scale transposed to [blocks, T]."""
    return x_fp8.contiguous(), x_scale.T.contiguous()


def _run_vector(x_1D: Tensor, data: Tensor, scale: Tensor, y_1O: Tensor, tiling: Tiling) -> None:
    rows, cols = data.shape
    # 16 bytes of a row for each thread: as many columns a step as the program's threads hold, or all of them.
    groups = min(4 * tiling.warps, triton.next_power_of_2(num_blocks(cols)))
    _vector[(triton.cdiv(rows, tiling.block_o * tiling.split),)](
        x_1D,
        data,
        scale,
        y_1O,
        rows,
        cols,
        num_blocks(cols),
        BLOCK_O=tiling.block_o,
        TILES=tiling.split,
        GROUPS=groups,
        STEPS=triton.cdiv(cols, groups * BLOCK),
        num_warps=max(1, groups // 4),
        **dependent_launch(x_1D.device),
    )
