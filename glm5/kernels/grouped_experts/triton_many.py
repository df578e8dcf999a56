"""The experts of many tokens, in FP8 on both sides: tiles of rows that share an expert, found by a plan.

`order` lists the (token, choice) pairs by expert, in ascending order within one. A tile is up to BLOCK_T of them, or of
the tokens at the shared expert, which come after all pairs: position T * A + t. What an expert makes of its rows lies
in that order (h), its terms of the sum in the pairs' own order (y), where `combine` finds them.
"""

import triton
import triton.language as tl

from glm5.kernels.triton_fp8 import let_later_begin, quantized, wait_for_earlier


@triton.jit
def plan(
    expert_ptr,
    order_ptr,
    tile_ptr,
    num_pairs,
    num_tiles,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program e: e's pairs into `order`, and e's tiles, (expert, first position, rows); the last one fills up.

    EXPERTS: E rounded up to a power of two, and more than E: what lies beyond the pairs counts as expert E.
    """
    e = tl.program_id(0)
    j = tl.arange(0, CHUNK)
    all_experts = tl.arange(0, EXPERTS)
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        experts = tl.load(expert_ptr + start + j, mask=start + j < num_pairs, other=E)
        counts += tl.histogram(experts, EXPERTS)
    counts = tl.where(all_experts < E, counts, 0)
    tiles = (counts + BLOCK_T - 1) // BLOCK_T
    first = tl.sum(tl.where(all_experts < e, counts, 0))
    count = tl.sum(tl.where(all_experts == e, counts, 0))
    first_tile = tl.sum(tl.where(all_experts < e, tiles, 0))

    at = first
    for start in range(0, num_pairs, CHUNK):
        experts = tl.load(expert_ptr + start + j, mask=start + j < num_pairs, other=E)
        mine = (experts == e).to(tl.int32)
        tl.store(order_ptr + at + tl.cumsum(mine) - 1, start + j, mask=mine > 0)
        at += tl.sum(mine)
    for tile in range(tl.cdiv(count, BLOCK_T)):
        tl.store(tile_ptr + (first_tile + tile) * 3, e)
        tl.store(tile_ptr + (first_tile + tile) * 3 + 1, first + tile * BLOCK_T)
        tl.store(tile_ptr + (first_tile + tile) * 3 + 2, min(BLOCK_T, count - tile * BLOCK_T))
    if e == E - 1:
        for tile in range(tl.sum(tiles), num_tiles):
            tl.store(tile_ptr + tile * 3 + 2, 0)


@triton.jit
def _tile(tile_ptr, tile, T, A: tl.constexpr, SHARED_TILES, BLOCK_T: tl.constexpr):
    """(expert or -1 for the shared one, first position, rows) of a tile; the shared expert's come first."""
    if tile < SHARED_TILES:
        expert = -1
        first = T * A + tile * BLOCK_T
        count = min(BLOCK_T, T - tile * BLOCK_T)
    else:
        at = tile_ptr + (tile - SHARED_TILES) * 3
        count = tl.load(at + 2)
        expert = tl.load(at, mask=count > 0, other=0)
        first = tl.load(at + 1, mask=count > 0, other=0)
    return expert, first, count


@triton.jit
def gate_up_tiles(
    x_ptr,
    x_scale_ptr,
    order_ptr,
    tile_ptr,
    w_ptr,
    scale_ptr,
    shared_gate_ptr,
    shared_gate_scale_ptr,
    shared_up_ptr,
    shared_up_scale_ptr,
    h_ptr,
    h_scale_ptr,
    T,
    D,
    F,
    scale_cols,
    rows,
    shared_tiles,
    A: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [rows, F] = silu(gate x) * up x, BLOCK_F values a program: in FP8 with a scale for 128 (column by column) where
    a program has so many; else in h's dtype.
    """
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    expert, first, count = _tile(tile_ptr, tl.program_id(1), T, A, shared_tiles, BLOCK_T)
    if count == 0:
        return
    r = tl.arange(0, BLOCK_T)
    i = tl.arange(0, 128)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    here = r < count
    scale_rows = tl.cdiv(F, 128)
    if expert < 0:
        token = first - T * A + r
        gate_ptr, up_ptr = shared_gate_ptr, shared_up_ptr
        gate_scale_ptr, up_scale_ptr = shared_gate_scale_ptr, shared_up_scale_ptr
    else:
        token = tl.load(order_ptr + first + r, mask=here, other=0) // A
        gate_ptr = w_ptr + expert.to(tl.int64) * 2 * F * D
        up_ptr = gate_ptr + F.to(tl.int64) * D
        gate_scale_ptr = scale_ptr + expert * 2 * scale_rows * scale_cols
        up_scale_ptr = gate_scale_ptr + scale_rows * scale_cols
    token = tl.where(here, token, 0)
    at = tl.minimum(f, F - 1).to(tl.int64)[:, None] * D + i[None, :]
    gate_at = tl.multiple_of(gate_ptr, 16) + at
    up_at = tl.multiple_of(up_ptr, 16) + at
    scale_at = (tl.program_id(0) * BLOCK_F // 128) * scale_cols
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
    row = first + r
    h_at = h_ptr + row.to(tl.int64)[:, None] * F + f[None, :]
    if BLOCK_F == 128:
        h_fp8, h_scale = quantized(tl.trans(h), 1)
        tl.store(h_at, h_fp8, mask=here[:, None] & (f < F)[None, :])
        tl.store(h_scale_ptr + tl.program_id(0) * rows + row, tl.reshape(h_scale, [BLOCK_T]), mask=here)
    else:
        tl.store(h_at, tl.trans(h).to(h_ptr.dtype.element_ty), mask=here[:, None] & (f < F)[None, :])


@triton.jit
def down_tiles(
    h_ptr,
    h_scale_ptr,
    order_ptr,
    tile_ptr,
    weight_ptr,
    w_ptr,
    scale_ptr,
    shared_ptr,
    shared_scale_ptr,
    y_ptr,
    T,
    D,
    F,
    rows,
    shared_tiles,
    A: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T * A + T, D] = down(h) * weight, in x's dtype. A program does TILES tiles of BLOCK_D outputs."""
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    expert, first, count = _tile(tile_ptr, tl.program_id(1), T, A, shared_tiles, BLOCK_T)
    if count == 0:
        return
    r = tl.arange(0, BLOCK_T)
    i = tl.arange(0, 128)
    d = tl.arange(0, BLOCK_D)
    here = r < count
    row = tl.where(here, first + r, first).to(tl.int64)
    if expert < 0:
        pair = first + r
        weight = tl.full([BLOCK_T], 1.0, tl.float32)
        at_ptr = shared_ptr
        at_scale_ptr = shared_scale_ptr
    else:
        pair = tl.load(order_ptr + first + r, mask=here, other=0)
        weight = tl.load(weight_ptr + pair, mask=here, other=0.0)
        at_ptr = w_ptr + expert.to(tl.int64) * F * D
        at_scale_ptr = scale_ptr + expert * tl.cdiv(D, 128) * BLOCKS
    at_ptr = tl.multiple_of(at_ptr, 16)
    h_at = h_ptr + row[None, :] * F + i[:, None]
    y_at = y_ptr + pair.to(tl.int64)[None, :] * D + d[:, None]
    start = tl.program_id(0) * TILES
    for step in tl.range(start, min(start + TILES, tl.cdiv(D, BLOCK_D)), num_stages=STAGES):
        output = tl.minimum(step * BLOCK_D + d, D - 1).to(tl.int64)
        y = tl.zeros([BLOCK_D, BLOCK_T], tl.float32)
        for block in tl.static_range(BLOCKS):
            inside = block * 128 + i < F
            w = tl.load(at_ptr + output[:, None] * F + block * 128 + i[None, :], mask=inside[None, :], other=0.0)
            h = tl.load(h_at + block * 128, mask=inside[:, None], other=0.0)
            scale = tl.load(at_scale_ptr + (step * BLOCK_D // 128) * BLOCKS + block)
            y += tl.dot(w, h) * (tl.load(h_scale_ptr + block * rows + row) * scale)[None, :]
        stored = here[None, :] & (step * BLOCK_D + d < D)[:, None]
        tl.store(y_at + step * BLOCK_D, (y * weight[None, :]).to(y_ptr.dtype.element_ty), mask=stored)
