"""The experts of few tokens, without sorting: every needed weight is read once.

`*_vector`, for up to a few tokens: each (token, expert) pair is a matrix-vector product. A program of the second kernel
computes some outputs of a token for all of its experts, and sums them.

`*_pairs`: a program is launched per (token, choice) pair. The first pair of each expert computes all of its pairs, the
others exit. Pairs are the columns of the MMA tile, 8 at a time. A third kernel sums the outputs of each token.
"""

import triton
import triton.language as tl

from glm5.kernels.triton_fp8 import (
    experts_of,
    pairs_of,
    partial_products,
    pdl_launch_dependents,
    pdl_wait,
    repeat_8,
    split_by_16,
    upcast,
)


@triton.jit
def gate_up_vector(
    x_ptr,
    expert_ptr,
    w_ptr,
    scale_ptr,
    shared_gate_ptr,
    shared_gate_scale_ptr,
    shared_up_ptr,
    shared_up_scale_ptr,
    h_ptr,
    D,
    F,
    scale_cols,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_F: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [T, A + SHARED, F] = silu(gate x) * up x, float32. A program computes TILES * BLOCK_F values of a pair."""
    K: tl.constexpr = GROUPS * 128
    t = tl.program_id(1).to(tl.int64)
    a = tl.program_id(2)
    scale_rows = tl.cdiv(F, 128)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    if a < A:
        expert = tl.load(expert_ptr + t * A + a).to(tl.int64)
        gate_ptr = w_ptr + expert * 2 * F * D
        up_ptr = gate_ptr + F.to(tl.int64) * D
        gate_scale_ptr = scale_ptr + expert * 2 * scale_rows * scale_cols
        up_scale_ptr = gate_scale_ptr + scale_rows * scale_cols
    else:
        gate_ptr, up_ptr = shared_gate_ptr, shared_up_ptr
        gate_scale_ptr, up_scale_ptr = shared_gate_scale_ptr, shared_up_scale_ptr
    f = tl.program_id(0) * (TILES * BLOCK_F) + tl.arange(0, BLOCK_F)
    g = tl.arange(0, GROUPS)
    k = tl.arange(0, K)
    scale_at = (tl.program_id(0) * (TILES * BLOCK_F) // 128) * scale_cols + g
    gate_ptr, up_ptr = tl.multiple_of(gate_ptr, 16), tl.multiple_of(up_ptr, 16)
    row = tl.minimum(f, F - 1).to(tl.int64)[:, None] * D + k[None, :]
    next_gate = tl.load(gate_ptr + row, mask=(k < D)[None, :], other=0.0)
    next_up = tl.load(up_ptr + row, mask=(k < D)[None, :], other=0.0)
    # All loads of x are issued before the first layout conversion, which needs a barrier.
    loads, xs, gate_scales, up_scales = (), (), (), ()
    for step in tl.static_range(STEPS):
        here = step * GROUPS + g < scale_cols
        gate_scale = tl.load(gate_scale_ptr + scale_at + step * GROUPS, mask=here, other=0.0)
        up_scale = tl.load(up_scale_ptr + scale_at + step * GROUPS, mask=here, other=0.0)
        gate_scales = gate_scales + (repeat_8(gate_scale),)
        up_scales = up_scales + (repeat_8(up_scale),)
        loads = loads + (tl.load(x_ptr + t * D + step * K + k, mask=step * K + k < D, other=0.0),)
    for step in tl.static_range(STEPS):
        xs = xs + (split_by_16(loads[step]),)
    for tile in tl.static_range(TILES):
        gate_F = tl.zeros([BLOCK_F, K // 16], tl.float32)
        up_F = tl.zeros([BLOCK_F, K // 16], tl.float32)
        for step in tl.static_range(STEPS):
            gate, up = next_gate, next_up
            if step + 1 < STEPS or tile + 1 < TILES:
                row = tl.minimum(f + (step + 1) // STEPS * BLOCK_F, F - 1).to(tl.int64)[:, None] * D
                col = (step + 1) % STEPS * K + k
                next_gate = tl.load(gate_ptr + row + col[None, :], mask=(col < D)[None, :], other=0.0)
                next_up = tl.load(up_ptr + row + col[None, :], mask=(col < D)[None, :], other=0.0)
            gate_F += partial_products(gate, xs[step]) * gate_scales[step][None, :]
            up_F += partial_products(up, xs[step]) * up_scales[step][None, :]
        gate_sum = tl.sum(gate_F, 1)
        h = gate_sum / (1 + tl.exp(-gate_sum)) * tl.sum(up_F, 1)
        tl.store(h_ptr + (t * (A + SHARED) + a) * F + f, h, mask=f < F)
        f += BLOCK_F


@triton.jit
def down_vector(
    h_ptr,
    weight_ptr,
    expert_ptr,
    w_ptr,
    scale_ptr,
    shared_ptr,
    shared_scale_ptr,
    out_ptr,
    D,
    F,
    A: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, D]: TILES times BLOCK_D outputs of a token, all of its experts at once.

    PAIRS and BLOCKS are A and F / 128, rounded up to powers of two. Weights are loaded before the kernel that computes
    h has ended, which is safe because that kernel began after the router's had ended.
    """
    FP: tl.constexpr = BLOCKS * 128
    K: tl.constexpr = PAIRS * FP
    t = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * (TILES * BLOCK_D) + tl.arange(0, BLOCK_D)
    a = tl.arange(0, PAIRS)
    f = tl.arange(0, FP)
    b = tl.arange(0, BLOCKS)
    k = tl.arange(0, K)
    scale_cols = tl.cdiv(F, 128)
    scale_row = (tl.program_id(0) * (TILES * BLOCK_D) // 128) * scale_cols + b
    expert = tl.load(expert_ptr + t * A + a, mask=a < A, other=0).to(tl.int64)
    start = tl.reshape(tl.broadcast_to(expert[:, None] * F * D, [PAIRS, FP]), [K])
    # As one row of all experts' values; the hints keep loads of 16 bytes.
    start = tl.multiple_of(tl.max_constancy(start, [FP]), [16]) + k % FP
    here = (k // FP < A) & (k % FP < F)
    row = tl.minimum(d, D - 1).to(tl.int64)[:, None] * F
    w = tl.load(w_ptr + row + start[None, :], mask=here[None, :], other=0.0)
    if SHARED:
        shared_w = tl.load(shared_ptr + row + f[None, :], mask=(f < F)[None, :], other=0.0)
        shared_scale = tl.load(shared_scale_ptr + scale_row, mask=b < scale_cols, other=0.0)
    scale = tl.load(
        scale_ptr + expert[:, None] * tl.cdiv(D, 128) * scale_cols + scale_row[None, :],
        mask=(a < A)[:, None] & (b < scale_cols)[None, :],
        other=0.0,
    )
    scale *= tl.load(weight_ptr + t * A + a, mask=a < A, other=0.0)[:, None]
    scale = repeat_8(tl.reshape(scale, [PAIRS * BLOCKS]))
    pdl_wait(PDL)
    h_at = h_ptr + t * (A + SHARED) * F
    h = split_by_16(tl.load(h_at + (k // FP) * F + k % FP, mask=here, other=0.0))
    if SHARED:
        shared_h = tl.load(h_at + A * F + f, mask=f < F, other=0.0)
        shared_h = tl.reshape(tl.reshape(shared_h, [BLOCKS, 128]) * shared_scale[:, None], [FP])
    for tile in tl.static_range(TILES):
        y = tl.sum(partial_products(w, h) * scale[None, :], 1)
        if SHARED:
            y += tl.sum(shared_w.to(tl.float32) * shared_h[None, :], 1)
        if tile + 1 < TILES:
            row = tl.minimum(d + BLOCK_D, D - 1).to(tl.int64)[:, None] * F
            w = tl.load(w_ptr + row + start[None, :], mask=here[None, :], other=0.0)
            if SHARED:
                shared_w = tl.load(shared_ptr + row + f[None, :], mask=(f < F)[None, :], other=0.0)
        else:
            pdl_launch_dependents(PDL)
        tl.store(out_ptr + t * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)
        d += BLOCK_D


@triton.jit
def gate_up_pairs(
    x_ptr,
    expert_ptr,
    w_ptr,
    scale_ptr,
    shared_gate_ptr,
    shared_gate_scale_ptr,
    shared_up_ptr,
    shared_up_scale_ptr,
    h_ptr,
    T,
    D,
    F,
    scale_cols,
    A: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [T * A + T, F] in x's dtype: rows of pairs, then of tokens at the shared expert."""
    p = tl.program_id(1)
    r = tl.arange(0, 8)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    i = tl.arange(0, 128)
    scale_rows = tl.cdiv(F, 128)
    row = tl.minimum(f, F - 1).to(tl.int64) * D
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    experts, expert, count = experts_of(expert_ptr, tl.minimum(p, T * A - 1), T * A, PAIRS)
    if p < T * A:
        gate_ptr = w_ptr + expert.to(tl.int64) * 2 * F * D
        up_ptr = gate_ptr + F.to(tl.int64) * D
        gate_scale_ptr = scale_ptr + expert * 2 * scale_rows * scale_cols
        up_scale_ptr = gate_scale_ptr + scale_rows * scale_cols
    else:
        gate_ptr, up_ptr = shared_gate_ptr, shared_up_ptr
        gate_scale_ptr, up_scale_ptr = shared_gate_scale_ptr, shared_up_scale_ptr
        count = min(8, T - (p - T * A) * 8)
    gate_at = tl.multiple_of(gate_ptr, 16) + (row[:, None] + i[None, :])
    up_at = tl.multiple_of(up_ptr, 16) + (row[:, None] + i[None, :])
    scale_at = (tl.program_id(0) * BLOCK_F // 128) * scale_cols
    for tile in range(tl.cdiv(count, 8)):
        if p < T * A:
            pair = pairs_of(experts, expert, tile, 8)
            token = pair // A
        else:
            token = (p - T * A) * 8 + r
            pair = T * A + token
        here = tile * 8 + r < count
        x_at = x_ptr + token.to(tl.int64)[None, :] * D + i[:, None]
        gate = tl.zeros([BLOCK_F, 8], tl.float32)
        up = tl.zeros([BLOCK_F, 8], tl.float32)
        for block in tl.range(scale_cols, num_stages=STAGES):
            inside = block * 128 + i < D
            gate_w = tl.load(gate_at + block * 128, mask=inside[None, :], other=0.0)
            up_w = tl.load(up_at + block * 128, mask=inside[None, :], other=0.0)
            x = tl.load(x_at + block * 128, mask=here[None, :] & inside[:, None], other=0.0)
            gate += tl.dot(upcast(gate_w, x), x, input_precision="ieee") * tl.load(gate_scale_ptr + scale_at + block)
            up += tl.dot(upcast(up_w, x), x, input_precision="ieee") * tl.load(up_scale_ptr + scale_at + block)
        h = gate / (1 + tl.exp(-gate)) * up
        h_at = h_ptr + pair.to(tl.int64)[None, :] * F + f[:, None]
        tl.store(h_at, h.to(h_ptr.dtype.element_ty), mask=here[None, :] & (f < F)[:, None])


@triton.jit
def down_pairs(
    h_ptr,
    weight_ptr,
    expert_ptr,
    w_ptr,
    scale_ptr,
    shared_ptr,
    shared_scale_ptr,
    y_ptr,
    T,
    D,
    F,
    A: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILES: tl.constexpr,
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T * A + T, D] float32 = down(h) * weight. A program does TILES tiles of BLOCK_D outputs. BLOCKS: of F.

    HELD: h, if short, is read once for all of them.
    """
    p = tl.program_id(1)
    r = tl.arange(0, 8)
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, 128)
    experts, expert, count = experts_of(expert_ptr, tl.minimum(p, T * A - 1), T * A, PAIRS)
    if p < T * A:
        at_ptr = w_ptr + expert.to(tl.int64) * F * D
        at_scale_ptr = scale_ptr + expert * tl.cdiv(D, 128) * BLOCKS
    else:
        at_ptr = shared_ptr
        at_scale_ptr = shared_scale_ptr
        count = min(8, T - (p - T * A) * 8)
    at_ptr = tl.multiple_of(at_ptr, 16)
    first = tl.program_id(0) * TILES
    last = min(first + TILES, tl.cdiv(D, BLOCK_D))
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    for tile in range(tl.cdiv(count, 8)):
        here = tile * 8 + r < count
        if p < T * A:
            pair = pairs_of(experts, expert, tile, 8)
            weight = tl.load(weight_ptr + pair, mask=here, other=0.0)
        else:
            pair = T * A + (p - T * A) * 8 + r
            weight = tl.full([8], 1.0, tl.float32)
        h_at = h_ptr + pair.to(tl.int64)[None, :] * F + i[:, None]
        y_at = y_ptr + pair.to(tl.int64)[None, :] * D + d[:, None]
        hs = ()
        if HELD:
            for block in tl.static_range(BLOCKS):
                inside = here[None, :] & (block * 128 + i < F)[:, None]
                hs = hs + (tl.load(h_at + block * 128, mask=inside, other=0.0),)
        for step in tl.range(first, last, num_stages=STAGES if HELD else 1):
            row = tl.minimum(step * BLOCK_D + d, D - 1).to(tl.int64)
            w_at = at_ptr + row[:, None] * F + i[None, :]
            scale_at = at_scale_ptr + (step * BLOCK_D // 128) * BLOCKS
            y = tl.zeros([BLOCK_D, 8], tl.float32)
            if HELD:
                for block in tl.static_range(BLOCKS):
                    w = tl.load(w_at + block * 128, mask=(block * 128 + i < F)[None, :], other=0.0)
                    y += tl.dot(upcast(w, hs[block]), hs[block], input_precision="ieee") * tl.load(scale_at + block)
            else:
                for block in tl.range(BLOCKS, num_stages=STAGES):
                    inside = block * 128 + i < F
                    w = tl.load(w_at + block * 128, mask=inside[None, :], other=0.0)
                    h = tl.load(h_at + block * 128, mask=here[None, :] & inside[:, None], other=0.0)
                    y += tl.dot(upcast(w, h), h, input_precision="ieee") * tl.load(scale_at + block)
            stored = here[None, :] & (step * BLOCK_D + d < D)[:, None]
            tl.store(y_at + step * BLOCK_D, y * weight[None, :], mask=stored)


@triton.jit
def sum_of_outputs(y_ptr, t, d, T, D, A: tl.constexpr, SHARED: tl.constexpr, place_ptr=None):
    """The float32 sum over token t's experts at columns d, in the order of its choices, then the shared expert.
    `place_ptr`: the row of each pair, if they are not in order."""
    total = tl.zeros(d.shape, tl.float32)
    for a in tl.static_range(A):
        row = t * A + a
        if place_ptr is not None:
            row = tl.load(place_ptr + row).to(tl.int64)
        total += tl.load(y_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(y_ptr + (tl.cast(T, tl.int64) * A + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
    return total


@triton.jit
def combine(
    y_ptr,
    out_ptr,
    T,
    D,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
    plus_ptr=None,
    place_ptr=None,
):
    """out [T, D]: the sum of each token's outputs. `plus`, if given, is added to the rounded sum."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    out = sum_of_outputs(y_ptr, t, d, T, D, A, SHARED, place_ptr).to(out_ptr.dtype.element_ty)
    if plus_ptr is not None:
        plus = tl.load(plus_ptr + t * D + d, mask=d < D, other=0.0)
        out = (out.to(tl.float32) + plus.to(tl.float32)).to(out.dtype)
    tl.store(out_ptr + t * D + d, out, mask=d < D)
