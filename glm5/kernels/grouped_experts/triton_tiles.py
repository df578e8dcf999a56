"""The experts of some tokens with FP8 activations and weights, for a few rows per expert.

A program handles an expert, or a tile of tokens at the shared one. Programs of the first kernel find the (token,
choice) pairs of their expert, so no plan is needed, and store them for the second kernel. Pairs are the columns of the
MMA tile, BLOCK_T at a time. Rows of h and y are pairs in their original order, then tokens at the shared expert: T * A
+ t.
"""

import triton
import triton.language as tl

from glm5.kernels.triton_fp8 import (
    pdl_launch_dependents,
    pdl_wait,
    quotient,
    scale_of,
)


@triton.jit
def _rows_of(found, expert, tile, T, A: tl.constexpr, BLOCK_T: tl.constexpr):
    """The `tile`-th BLOCK_T rows of an expert, arbitrary past the last; for the shared one, with one tile per program,
    tokens. found: the stored pairs of the expert."""
    if expert < 0:
        rows = T * A + tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    else:
        place = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        rows = tl.load(found + expert * (T * A) + place, mask=place < T * A, other=0, cache_modifier=".cg")
    return rows


@triton.jit
def _find(expert_ptr, expert, count_ptr, found_ptr, T, A: tl.constexpr, PAIRS: tl.constexpr):
    """Stores the pairs of an expert and returns their number. Programs of one expert store the same."""
    j = tl.arange(0, PAIRS)
    is_expert = (tl.load(expert_ptr + j, mask=j < T * A, other=-1) == expert).to(tl.int32)
    count = tl.sum(is_expert)
    tl.store(count_ptr + expert, count)
    tl.store(found_ptr + expert * (T * A) + tl.cumsum(is_expert) - 1, j, mask=is_expert > 0)
    tl.debug_barrier()
    return count


@triton.jit
def gate_up_tiles(
    x_ptr,
    x_scale_ptr,
    expert_ptr,
    w_ptr,
    scale_ptr,
    shared_gate_ptr,
    shared_gate_scale_ptr,
    shared_up_ptr,
    shared_up_scale_ptr,
    h_ptr,
    h_scale_ptr,
    count_ptr,
    found_ptr,
    T,
    D,
    F,
    scale_cols,
    shared_tiles,
    A: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [T * A + T, F] = silu(gate x) * up x, BLOCK_F values a program: in FP8 with a scale for 128 (column by column)
    where a program has so many; else in h's dtype. PAIRS: T * A, rounded up to a power of two.

    count [E] and found [E, T * A]: each expert's pairs, in order.
    """
    expert = tl.program_id(1) - shared_tiles
    r = tl.arange(0, BLOCK_T)
    i = tl.arange(0, 128)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    scale_rows = tl.cdiv(F, 128)
    if expert < 0:
        gate_ptr, up_ptr = shared_gate_ptr, shared_up_ptr
        gate_scale_ptr, up_scale_ptr = shared_gate_scale_ptr, shared_up_scale_ptr
    else:
        gate_ptr = w_ptr + expert.to(tl.int64) * 2 * F * D
        up_ptr = gate_ptr + F.to(tl.int64) * D
        gate_scale_ptr = scale_ptr + expert * 2 * scale_rows * scale_cols
        up_scale_ptr = gate_scale_ptr + scale_rows * scale_cols
    row = tl.minimum(f, F - 1).to(tl.int64) * D
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    count = tl.minimum(BLOCK_T, T - tl.program_id(1) * BLOCK_T)
    if expert >= 0:
        count = _find(expert_ptr, expert, count_ptr, found_ptr, T, A, PAIRS)
    if count == 0:
        return
    gate_at = tl.multiple_of(gate_ptr, 16) + (row[:, None] + i[None, :])
    up_at = tl.multiple_of(up_ptr, 16) + (row[:, None] + i[None, :])
    scale_at = (tl.program_id(0) * BLOCK_F // 128) * scale_cols
    for tile in range(tl.cdiv(count, BLOCK_T)):
        here = tile * BLOCK_T + r < count
        pair = tl.where(here, _rows_of(found_ptr, expert, tile, T, A, BLOCK_T), 0)
        token = tl.where(here, tl.where(pair < T * A, pair // A, pair - T * A), 0)
        x_at = x_ptr + token.to(tl.int64)[None, :] * D + i[:, None]
        gate = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
        for block in tl.range(scale_cols, num_stages=STAGES):
            inside = block * 128 + i < D
            gate_w = tl.load(gate_at + block * 128, mask=inside[None, :], other=0.0)
            up_w = tl.load(up_at + block * 128, mask=inside[None, :], other=0.0)
            x = tl.load(x_at + block * 128, mask=inside[:, None], other=0.0)
            x_scale = tl.load(x_scale_ptr + block * T + token)
            gate += tl.dot(gate_w, x) * (x_scale * tl.load(gate_scale_ptr + scale_at + block))[None, :]
            up += tl.dot(up_w, x) * (x_scale * tl.load(up_scale_ptr + scale_at + block))[None, :]
        h = gate / (1 + tl.exp(-gate)) * up
        h = tl.where((f < F)[:, None], h, 0.0)
        h_at = h_ptr + pair.to(tl.int64)[:, None] * F + f[None, :]
        if BLOCK_F == 128:
            h_scale, inverse = scale_of(tl.max(tl.abs(h), 0))
            wide, inverse = tl.broadcast_to(h_scale[None, :], h.shape), tl.broadcast_to(inverse[None, :], h.shape)
            tl.store(h_at, tl.trans(quotient(h, wide, inverse)), mask=here[:, None] & (f < F)[None, :])
            tl.store(h_scale_ptr + tl.program_id(0) * (T * A + T) + pair, h_scale, mask=here)
        else:
            tl.store(h_at, tl.trans(h).to(h_ptr.dtype.element_ty), mask=here[:, None] & (f < F)[None, :])


@triton.jit
def down_tiles(
    h_ptr,
    h_scale_ptr,
    count_ptr,
    found_ptr,
    weight_ptr,
    w_ptr,
    scale_ptr,
    shared_ptr,
    shared_scale_ptr,
    y_ptr,
    T,
    D,
    F,
    shared_tiles,
    A: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T * A + T, D] = down(h) * weight, in x's dtype. A program does TILES tiles of BLOCK_D outputs.

    HELD: h, if short, is read once for all of them.
    """
    expert = tl.program_id(1) - shared_tiles
    r, i, d = tl.arange(0, BLOCK_T), tl.arange(0, 128), tl.arange(0, BLOCK_D)
    rows = T * A + T
    start = tl.program_id(0) * TILES
    end = min(start + TILES, tl.cdiv(D, BLOCK_D))
    if expert < 0:
        at_ptr, at_scale_ptr = shared_ptr, shared_scale_ptr
    else:
        at_ptr = w_ptr + expert.to(tl.int64) * F * D
        at_scale_ptr = scale_ptr + expert * tl.cdiv(D, 128) * BLOCKS
    at_ptr = tl.multiple_of(at_ptr, 16)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    first = _rows_of(found_ptr, expert, 0, T, A, BLOCK_T)  # beside their number
    count = tl.minimum(BLOCK_T, T - tl.program_id(1) * BLOCK_T)
    if expert >= 0:
        count = tl.load(count_ptr + expert)
    for tile in range(tl.cdiv(count, BLOCK_T)):
        here = tile * BLOCK_T + r < count
        pair = first
        if tile > 0:
            pair = _rows_of(found_ptr, expert, tile, T, A, BLOCK_T)
        pair = tl.where(here, pair, 0)
        weight = tl.load(weight_ptr + pair, mask=here & (pair < T * A), other=1.0)
        h_at = h_ptr + pair.to(tl.int64)[None, :] * F + i[:, None]
        y_at = y_ptr + pair.to(tl.int64)[None, :] * D + d[:, None]
        h_scale_at = h_scale_ptr + pair
        hs, h_scales = (), ()
        if HELD:
            for block in tl.static_range(BLOCKS):
                hs = hs + (tl.load(h_at + block * 128, mask=(block * 128 + i < F)[:, None], other=0.0),)
                h_scales = h_scales + (tl.load(h_scale_at + block * rows) * weight,)
        for step in tl.range(start, end, num_stages=STAGES if HELD else 1):
            output = tl.minimum(step * BLOCK_D + d, D - 1).to(tl.int64)
            w_at = at_ptr + output[:, None] * F + i[None, :]
            scale_at = at_scale_ptr + (step * BLOCK_D // 128) * BLOCKS
            y = tl.zeros([BLOCK_D, BLOCK_T], tl.float32)
            if HELD:
                for block in tl.static_range(BLOCKS):
                    w = tl.load(w_at + block * 128, mask=(block * 128 + i < F)[None, :], other=0.0)
                    y += tl.dot(w, hs[block]) * (h_scales[block] * tl.load(scale_at + block))[None, :]
            else:
                for block in tl.range(BLOCKS, num_stages=STAGES):
                    inside = block * 128 + i < F
                    w = tl.load(w_at + block * 128, mask=inside[None, :], other=0.0)
                    h = tl.load(h_at + block * 128, mask=inside[:, None], other=0.0)
                    scale = tl.load(h_scale_at + block * rows) * weight * tl.load(scale_at + block)
                    y += tl.dot(w, h) * scale[None, :]
            stored = here[None, :] & (step * BLOCK_D + d < D)[:, None]
            tl.store(y_at + step * BLOCK_D, y.to(y_ptr.dtype.element_ty), mask=stored)
