"""Pieces of Triton kernels over weights as codes. Imported by `triton.py` files only, as Triton may be missing.

Rows that meet int4 codes come in halves: first the values of even inputs, then those of odd ones. A byte holds the
codes of an even and an odd input, so each of its halves meets neighbours in memory, and nothing is shuffled.
"""

import triton
import triton.language as tl


@triton.jit
def as_operand(w, x):
    """Codes as x's dtype, exactly. By way of float32: straight to 16 bits is slower (triton_fp8.widened)."""
    if w.dtype == x.dtype:
        return w
    return w.to(tl.float32).to(x.dtype)


@triton.jit
def codes_times_rows(
    w_ptr, row, x_ptr, column, here, block, cols, INT4: tl.constexpr, BLOCK_K: tl.constexpr, INTEGER: tl.constexpr
):
    """Codes of rows `row` [R] times those of x's rows `column` [T], over inputs `block` * BLOCK_K and on: [R, T].

    int32 for INTEGER (rows of int8), else float32. `here` [T]: which rows of x there are. `cols`: of the codes'
    tensor, which for INT4 is half of x's; given as it is, its divisibility is known, and loads are wide.
    """
    if INT4:
        i = block * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        inside = i < cols
        at = x_ptr + column[None, :] * (2 * cols) + i[:, None]
        known = inside[:, None] & here[None, :]
        byte = tl.load(w_ptr + row[:, None] * cols + i[None, :], mask=inside[None, :], other=0)
        even = tl.load(at, mask=known, other=0.0)
        odd = tl.load(at + cols, mask=known, other=0.0)
        # Shifts of int8 keep the sign.
        low, high = as_operand((byte << 4) >> 4, even), as_operand(byte >> 4, odd)
        if INTEGER:
            return tl.dot(low, even) + tl.dot(high, odd)
        return tl.dot(low, even, input_precision="ieee") + tl.dot(high, odd, input_precision="ieee")
    i = block * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = i < cols
    x = tl.load(x_ptr + column[None, :] * cols + i[:, None], mask=inside[:, None] & here[None, :], other=0.0)
    w = tl.load(w_ptr + row[:, None] * cols + i[None, :], mask=inside[None, :], other=0.0)
    if INTEGER:
        return tl.dot(as_operand(w, x), x)
    return tl.dot(as_operand(w, x), x, input_precision="ieee")


@triton.jit
def weight_times_rows(
    weight,
    row,
    rows,
    cols,
    INT4: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Weight rows `row` [R] times rows `column` [T] of x, scales of the weight included: [R, T] float32.

    `weight`: (codes, scales, how many of them in a row); `rows`: (x, column, here).
    GROUP: inputs that share a scale, a multiple of BLOCK_K; 0: all of a row.
    """
    w_ptr, scale_ptr, scale_cols = weight
    x_ptr, column, here = rows
    steps = tl.cdiv(cols, BLOCK_K // 2 if INT4 else BLOCK_K)
    scale_at = scale_ptr + row * scale_cols
    total = tl.zeros([row.shape[0], BLOCK_T], tl.float32)
    if GROUP:
        for block in tl.range(0, steps, num_stages=STAGES):
            part = codes_times_rows(w_ptr, row, x_ptr, column, here, block, cols, INT4, BLOCK_K, INTEGER)
            scale = tl.load(scale_at + block * BLOCK_K // GROUP)
            total += part.to(tl.float32) * scale[:, None]
        return total
    scale = tl.load(scale_at)
    if INTEGER:
        sums = tl.zeros([row.shape[0], BLOCK_T], tl.int32)
        for block in tl.range(0, steps, num_stages=STAGES):
            sums += codes_times_rows(w_ptr, row, x_ptr, column, here, block, cols, INT4, BLOCK_K, INTEGER)
        return sums.to(tl.float32) * scale[:, None]
    for block in tl.range(0, steps, num_stages=STAGES):
        # Scaled block by block: FP8 matrix units must not add up more than that in their own few bits.
        total += codes_times_rows(w_ptr, row, x_ptr, column, here, block, cols, INT4, BLOCK_K, INTEGER) * scale[:, None]
    return total
