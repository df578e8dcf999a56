"""The experts of one token, or a few: each (token, expert) pair is a matrix-vector product of int4 codes in float32.

Two kernels; rows are quantized in each program that reads them, which costs less than a launch. What is multiplied are
the numbers that codes stand for in units of their scales, so that integer products are exact.
"""

import triton
import triton.language as tl

from glm5.kernels.triton_codes import as_met, scale_of_rows, sums_of_eight
from glm5.kernels.triton_fp8 import let_later_begin, wait_for_earlier


@triton.jit
def _scaled(sums, scale_ptr, row, scale_cols, first, GROUP: tl.constexpr):
    """Sums of 8 products [R, W] as those of groups, scaled: [R, W * 8 / GROUP]. `first`: of the groups."""
    WORDS: tl.constexpr = GROUP // 8
    GROUPS: tl.constexpr = sums.shape[1] // WORDS
    g = first + tl.arange(0, GROUPS)
    scale = tl.load(scale_ptr + row[:, None] * scale_cols + g[None, :], mask=(g < scale_cols)[None, :], other=0.0)
    return tl.sum(tl.reshape(sums, [sums.shape[0], GROUPS, WORDS]), 2) * scale


@triton.jit
def gate_up_vector(
    x_ptr,
    expert_ptr,
    w_ptr,
    scale_ptr,
    h_ptr,
    D,
    F,
    words,
    scale_cols,
    A: tl.constexpr,
    ACT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [T, A, F] = silu(gate x) * up x in h's dtype. A program does TILES times BLOCK_F values of a pair.

    `words`: of eight codes, in a row of weights; STEPS times WORDS cover them.
    """
    SUMS: tl.constexpr = WORDS * 8 // GROUP if GROUP else WORDS
    t = tl.program_id(1).to(tl.int64)
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    expert = tl.load(expert_ptr + t * A + tl.program_id(2)).to(tl.int64)
    gate_ptr = tl.multiple_of(w_ptr + expert * 2 * F * words, 16)
    up_ptr = tl.multiple_of(gate_ptr + F.to(tl.int64) * words, 16)
    gate_scale_ptr = scale_ptr + expert * 2 * F * scale_cols
    up_scale_ptr = gate_scale_ptr + F.to(tl.int64) * scale_cols
    f = tl.program_id(0) * (TILES * BLOCK_F) + tl.arange(0, BLOCK_F)
    k = tl.arange(0, WORDS)
    i = tl.arange(0, WORDS * 8)
    at = tl.minimum(f, F - 1).to(tl.int64)[:, None] * words + k[None, :]
    next_gate = tl.load(gate_ptr + at, mask=(k < words)[None, :], other=0)
    next_up = tl.load(up_ptr + at, mask=(k < words)[None, :], other=0)
    # All of x on its way before the first is put in order, which takes a barrier.
    loads, xs = (), ()
    for step in tl.static_range(STEPS):
        inside = step * WORDS * 8 + i < D
        loads = loads + (tl.load(x_ptr + t * D + step * WORDS * 8 + i, mask=inside, other=0.0),)
    largest = tl.abs(loads[0].to(tl.float32))
    for step in tl.static_range(1, STEPS):
        largest = tl.maximum(largest, tl.abs(loads[step].to(tl.float32)))
    x_scale = scale_of_rows(tl.max(largest, 0), ACT)
    for step in tl.static_range(STEPS):
        x = as_met(loads[step].to(tl.float32), tl.broadcast_to(x_scale, loads[step].shape), ACT)
        xs = xs + (tl.reshape(x, [WORDS, 8]),)
    for tile in tl.static_range(TILES):
        row = tl.minimum(f, F - 1).to(tl.int64)
        gate_sums = tl.zeros([BLOCK_F, SUMS], tl.float32)
        up_sums = tl.zeros([BLOCK_F, SUMS], tl.float32)
        for step in tl.static_range(STEPS):
            gate, up = next_gate, next_up
            if step + 1 < STEPS or tile + 1 < TILES:
                later = tl.minimum(f + (step + 1) // STEPS * BLOCK_F, F - 1).to(tl.int64)[:, None] * words
                col = (step + 1) % STEPS * WORDS + k
                next_gate = tl.load(gate_ptr + later + col[None, :], mask=(col < words)[None, :], other=0)
                next_up = tl.load(up_ptr + later + col[None, :], mask=(col < words)[None, :], other=0)
            gate_y, up_y = sums_of_eight(gate, xs[step]), sums_of_eight(up, xs[step])
            if GROUP:
                gate_y = _scaled(gate_y, gate_scale_ptr, row, scale_cols, step * SUMS, GROUP)
                up_y = _scaled(up_y, up_scale_ptr, row, scale_cols, step * SUMS, GROUP)
            gate_sums += gate_y
            up_sums += up_y
        gate_F, up_F = tl.sum(gate_sums, 1) * x_scale, tl.sum(up_sums, 1) * x_scale
        if not GROUP:
            gate_F *= tl.load(gate_scale_ptr + row)
            up_F *= tl.load(up_scale_ptr + row)
        h = gate_F / (1 + tl.exp(-gate_F)) * up_F
        h_at = h_ptr + (t * A + tl.program_id(2)) * F + f
        tl.store(h_at, h.to(h_ptr.dtype.element_ty), mask=f < F)
        f += BLOCK_F


@triton.jit
def down_vector(
    h_ptr,
    weight_ptr,
    expert_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    D,
    F,
    words,
    scale_cols,
    A: tl.constexpr,
    PAIRS: tl.constexpr,
    ACT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, D]: TILES times BLOCK_D outputs of a token, all of its experts at once.

    PAIRS and WORDS are A and the words of a row, rounded up to powers of two. Weights are on their way before the
    kernel that makes h has ended: it did not begin before the router's had.
    """
    K: tl.constexpr = PAIRS * WORDS
    SUMS: tl.constexpr = WORDS * 8 // GROUP if GROUP else 1
    t = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * (TILES * BLOCK_D) + tl.arange(0, BLOCK_D)
    a, k = tl.arange(0, PAIRS), tl.arange(0, K)
    expert = tl.load(expert_ptr + t * A + a, mask=a < A, other=0).to(tl.int64)
    start = tl.reshape(tl.broadcast_to((expert * D)[:, None] * words, [PAIRS, WORDS]), [K])
    # As one row of all experts' values; the hints keep loads of 16 bytes.
    start = tl.multiple_of(tl.max_constancy(start, [WORDS]), [16]) + k % WORDS
    here = (k // WORDS < A) & (k % WORDS < words)
    row = tl.minimum(d, D - 1).to(tl.int64)
    w = tl.load(w_ptr + row[:, None] * words + start[None, :], mask=here[None, :], other=0)
    weight = tl.load(weight_ptr + t * A + a, mask=a < A, other=0.0)
    wait_for_earlier(PDL)
    i = tl.arange(0, WORDS * 8)
    known = (a < A)[:, None] & (i < F)[None, :]
    h = tl.load(h_ptr + (t * A + a)[:, None] * F + i[None, :], mask=known, other=0.0).to(tl.float32)
    h_scale = scale_of_rows(tl.max(tl.abs(h), 1), ACT)
    h = tl.reshape(as_met(h, tl.broadcast_to(h_scale[:, None], h.shape), ACT), [K, 8])
    weight *= h_scale
    # The scale of group g of expert a.
    s = tl.arange(0, PAIRS * SUMS)
    first = tl.reshape(tl.broadcast_to((expert * D)[:, None] * scale_cols, [PAIRS, SUMS]), [PAIRS * SUMS]) + s % SUMS
    scaled = (s // SUMS < A) & (s % SUMS < scale_cols)
    weight = tl.reshape(tl.broadcast_to(weight[:, None], [PAIRS, SUMS]), [PAIRS * SUMS])
    for tile in tl.static_range(TILES):
        scale = tl.load(scale_ptr + row[:, None] * scale_cols + first[None, :], mask=scaled[None, :], other=0.0)
        sums = tl.sum(tl.reshape(sums_of_eight(w, h), [BLOCK_D, PAIRS * SUMS, WORDS // SUMS]), 2)
        y = tl.sum(sums * (scale * weight[None, :]), 1)
        if tile + 1 < TILES:
            row = tl.minimum(d + BLOCK_D, D - 1).to(tl.int64)
            w = tl.load(w_ptr + row[:, None] * words + start[None, :], mask=here[None, :], other=0)
        else:
            let_later_begin(PDL)
        tl.store(out_ptr + t * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)
        d += BLOCK_D
