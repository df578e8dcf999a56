"""Products of rows with a matrix, or with that of each row's expert, under one tiling: an output is one sum over the
inputs, block by block in order, whatever the number of rows and the place of its row."""

import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.dispatch import forward_only

TILE = 64  # rows of a program: the smallest product of a warp group


@triton.jit
def _products(
    x_ptr,
    w_ptr,
    out_ptr,
    row_ptr,
    expert_ptr,
    T,
    O,
    I,
    stride_x,
    stride_e,
    stride_o,
    GATHERS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """program_id(0): block of outputs; (1): tile of rows. A tile whose expert is -1 is not computed."""
    tile = tl.program_id(1)
    t = tile.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.program_id(0).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    expert = tl.load(expert_ptr + tile).to(tl.int64) if GROUPED else tl.full([], 0, tl.int64)
    if expert >= 0:
        row = tl.load(row_ptr + t, mask=t < T, other=0) if GATHERS else t
        x_at = x_ptr + row[:, None] * stride_x + i[None, :]
        w_at = w_ptr + expert * stride_e + o[None, :] * stride_o + i[:, None]
        sums = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
        for start in tl.range(0, I, BLOCK_I):
            inside = start + i < I
            x = tl.load(x_at + start, mask=(t < T)[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=(o < O)[None, :] & inside[:, None], other=0.0)
            sums = tl.dot(x, w, sums, input_precision="ieee")
        at = t[:, None] * O + o[None, :]
        tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=(t < T)[:, None] & (o < O)[None, :])


@forward_only("row_linear[triton]")
def row_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """As `reference.row_linear`, without a gradient."""
    rows = x.reshape(-1, x.shape[-1])
    return products(rows, weight_OI).view(*x.shape[:-1], len(weight_OI))


def products(x_TI: Tensor, weight: Tensor, expert_N: Tensor | None = None, row_G: Tensor | None = None) -> Tensor:
    """Rows [T, I] times the transpose of `weight` [O, I]: [T, O] in their dtype.

    With `expert_N` int32, `weight` is [E, O, I], and tile n, the rows from n * TILE on, has the expert expert_N[n]; one
    of -1 leaves its rows as they are, uninitialized. `row_G` int64: the row of x that each row of the result is of.
    """
    x_TI = x_TI if x_TI.stride(-1) == 1 else x_TI.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    num_rows, (num_out, width) = len(x_TI) if row_G is None else len(row_G), weight.shape[-2:]
    out_TO = x_TI.new_empty(num_rows, num_out)
    is_wide = x_TI.element_size() > 2  # products of float32 take registers where others take matrix units
    block_o = 32 if is_wide else 128 if num_out >= 1024 else 64  # follows from the weight alone
    if num_rows:
        _products[(triton.cdiv(num_out, block_o), triton.cdiv(num_rows, TILE))](
            x_TI,
            weight,
            out_TO,
            x_TI if row_G is None else row_G,
            x_TI if expert_N is None else expert_N,
            num_rows,
            num_out,
            width,
            x_TI.stride(0),
            0 if expert_N is None else weight.stride(0),
            weight.stride(-2),
            GATHERS=row_G is not None,
            GROUPED=expert_N is not None,
            BLOCK_T=TILE,
            BLOCK_O=block_o,
            BLOCK_I=32 if is_wide else 64,
            num_warps=4,
            num_stages=3,
        )
    return out_TO
