"""Device functions of Triton kernels with quantized weights. Imported by `triton.py` files only, as Triton may be
missing.

Activations for int4 products are stored in halves: values of even inputs, then of odd ones. A byte has the codes of an
even and an odd input, so each nibble is multiplied by contiguous activations, without shuffles. Four bytes are unpacked
at a time, into numbers that are a power of two times the code (`unit`):

    int8      16 code      the half moved to the upper end of its byte; the sign is there already
    e4m3      code / 512   sign and magnitude: below 9, e4m3 counts in steps of 2^-9
    bfloat16  code         128 + (code + 8) by putting bits together, less 136
"""

import triton
import triton.language as tl

# No inline assembly in Triton's interpreter.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_TO_INT8 = tl.constexpr("shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0;")
# s: 1 where negative. (half ^ 15 s) + s is the magnitude, 128 s the sign.
_TO_E4M3 = tl.constexpr("""{
    .reg .b32 high, s, m, e;
    shr.b32 s, $2, 3; and.b32 s, s, 0x01010101; mul.lo.u32 m, s, 15;
    lop3.b32 e, $2, 0x0F0F0F0F, m, 0x6A; mad.lo.u32 $0, s, 129, e;
    shr.b32 high, $2, 4;
    shr.b32 s, $2, 7; and.b32 s, s, 0x01010101; mul.lo.u32 m, s, 15;
    lop3.b32 e, high, 0x0F0F0F0F, m, 0x6A; mad.lo.u32 $1, s, 129, e;
}""")
_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 u, one, less;
    mov.b32 one, 0x3F803F80; mov.b32 less, 0xC308C308;
    lop3.b32 u, $4, 0x0F0F0F0F, 0x08080808, 0x6A;
    prmt.b32 $0, u, 0x43434343, 0x4140; prmt.b32 $1, u, 0x43434343, 0x4342;
    shr.b32 u, $4, 4; lop3.b32 u, u, 0x0F0F0F0F, 0x08080808, 0x6A;
    prmt.b32 $2, u, 0x43434343, 0x4140; prmt.b32 $3, u, 0x43434343, 0x4342;
    fma.rn.bf16x2 $0, $0, one, less; fma.rn.bf16x2 $1, $1, one, less;
    fma.rn.bf16x2 $2, $2, one, less; fma.rn.bf16x2 $3, $3, one, less;
}""")


@triton.jit
def as_operand(w, x):
    """Codes as x's dtype, exactly. By way of float32: straight to 16 bits is slower (triton_fp8.upcast)."""
    if w.dtype == x.dtype:
        return w
    return w.to(tl.float32).to(x.dtype)


@triton.jit
def halves(byte, x):
    """Bytes of two int4 codes as operands for rows like x: (even inputs, odd inputs), each `unit` times the codes."""
    if x.dtype == tl.int8 and not _INTERPRETED:
        low, high = tl.inline_asm_elementwise(
            _TO_INT8, "=&r,=&r,r", [byte], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    elif x.dtype == tl.float8e4nv and not _INTERPRETED:
        low, high = tl.inline_asm_elementwise(
            _TO_E4M3, "=&r,=&r,r", [byte], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
        low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
    elif x.dtype == tl.bfloat16 and not _INTERPRETED:
        low, high = tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=&r,=&r,=&r,=&r,r", [byte], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        # Shifts of int8 keep the sign.
        low, high = as_operand((byte << 4) >> 4, x), as_operand(byte >> 4, x)
    return low, high


@triton.jit
def unit(x_ptr, INT4: tl.constexpr):
    """What a product with operands from `halves` has to be multiplied by."""
    if not INT4 or _INTERPRETED:
        by: tl.constexpr = 1.0
    elif x_ptr.dtype.element_ty == tl.int8:
        by: tl.constexpr = 0.0625
    elif x_ptr.dtype.element_ty == tl.float8e4nv:
        by: tl.constexpr = 512.0
    else:
        by: tl.constexpr = 1.0
    return by


@triton.jit
def int4_product(byte, even, odd):
    """Bytes [R, K / 2] of two codes times rows' even and odd inputs [K / 2, T]: [R, T], in units; int32 for int8."""
    low, high = halves(byte, even)
    if even.dtype == tl.int8:
        y = tl.dot(high, odd, acc=tl.dot(low, even, out_dtype=tl.int32), out_dtype=tl.int32)
    else:
        y = tl.dot(high, odd, acc=tl.dot(low, even, input_precision="ieee"), input_precision="ieee")
    return y


@triton.jit
def product(w, x):
    """Codes [R, K] times rows [K, T]: [R, T]; int32 for int8."""
    if x.dtype == tl.int8:
        y = tl.dot(as_operand(w, x), x, out_dtype=tl.int32)
    else:
        y = tl.dot(as_operand(w, x), x, input_precision="ieee")
    return y


@triton.jit
def codes_times_rows(w_ptr, row, x_ptr, column, here, block, cols, INT4: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes of rows `row` [R] times those of x's rows `column` [T], over inputs `block` * BLOCK_K and on: [R, T], in
    units.

    `here` [T]: which rows of x there are. `cols`: of the codes' tensor, which for INT4 is half of x's; given as it is,
    its divisibility is known, and loads are wide.
    """
    if INT4:
        i = block * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        inside = i < cols
        at = x_ptr + column[None, :] * (2 * cols) + i[:, None]
        known = inside[:, None] & here[None, :]
        byte = tl.load(w_ptr + row[:, None] * cols + i[None, :], mask=inside[None, :], other=0.0)
        y = int4_product(byte, tl.load(at, mask=known, other=0.0), tl.load(at + cols, mask=known, other=0.0))
    else:
        i = block * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = i < cols
        x = tl.load(x_ptr + column[None, :] * cols + i[:, None], mask=inside[:, None] & here[None, :], other=0.0)
        y = product(tl.load(w_ptr + row[:, None] * cols + i[None, :], mask=inside[None, :], other=0.0), x)
    return y


@triton.jit
def num_steps(cols, INT4: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """Of PARTS times BLOCK_K inputs; `cols` as for `codes_times_rows`."""
    return tl.cdiv(cols, PARTS * (BLOCK_K // 2 if INT4 else BLOCK_K))


@triton.jit
def integer_sums(
    w_ptr,
    row,
    rows,
    cols,
    first,
    last,
    INT4: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What steps `first` to `last` add to products in int8: [R, T] int32, in units. `rows`: see `weight_times_rows`."""
    x_ptr, column, here = rows
    sums = tl.zeros([row.shape[0], BLOCK_T], tl.int32)
    for step in tl.range(first, last, num_stages=STAGES):
        for part in tl.static_range(PARTS):
            sums += codes_times_rows(w_ptr, row, x_ptr, column, here, step * PARTS + part, cols, INT4, BLOCK_K)
    return sums


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
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Weight rows `row` [R] times rows `column` [T] of x, scales of the weight included: [R, T] float32.

    `weight`: (codes, scales, how many of them in a row); `rows`: (x, column, here). A step takes PARTS times BLOCK_K
    inputs. GROUP: inputs that share a scale, a multiple of BLOCK_K; 0: all of a row.
    """
    w_ptr, scale_ptr, scale_cols = weight
    x_ptr, column, here = rows
    steps = num_steps(cols, INT4, BLOCK_K, PARTS)
    scale_at = scale_ptr + row * scale_cols
    total = tl.zeros([row.shape[0], BLOCK_T], tl.float32)
    if GROUP:
        for step in tl.range(0, steps, num_stages=STAGES):
            scales = ()
            for part in tl.static_range(PARTS):
                group = tl.minimum((step * PARTS + part) * BLOCK_K // GROUP, scale_cols - 1)
                scales = scales + (tl.load(scale_at + group),)
            for part in tl.static_range(PARTS):
                y = codes_times_rows(w_ptr, row, x_ptr, column, here, step * PARTS + part, cols, INT4, BLOCK_K)
                total += y.to(tl.float32) * scales[part][:, None]
    elif INTEGER:
        sums = integer_sums(w_ptr, row, rows, cols, 0, steps, INT4, BLOCK_K, PARTS, BLOCK_T, STAGES)
        total = sums.to(tl.float32) * tl.load(scale_at)[:, None]
    else:
        scale = tl.load(scale_at)
        for step in tl.range(0, steps, num_stages=STAGES):
            for part in tl.static_range(PARTS):
                # Scaled block by block: FP8 matrix units must not add up more than that in their own few bits.
                y = codes_times_rows(w_ptr, row, x_ptr, column, here, step * PARTS + part, cols, INT4, BLOCK_K)
                total += y * scale[:, None]
    return total * unit(x_ptr, INT4)
