"""The experts of many tokens, in FP8 on both sides: tiles of rows that share an expert, found by a plan.

`order` lists the (token, choice) pairs by expert, in ascending order within one. A tile is up to BLOCK_T of them, or of
the tokens at the shared expert, which come after all pairs: position T * A + t. What an expert makes of its rows lies
in that order (h), its terms of the sum in the pairs' own order (y), where `combine` finds them.
"""

import triton
import triton.language as tl

from glm5.kernels.triton_fp8 import let_later_begin, quotient, scale_of, wait_for_earlier


@triton.jit
def count(expert_ptr, count_ptr, rank_ptr, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """count [chunks, EXPERTS]: how many of a chunk's pairs each expert has; what is beyond the pairs, the last one.
    rank [pairs]: how many of them come before a pair.
    """
    i = tl.arange(0, CHUNK)
    j = tl.program_id(0) * CHUNK + i
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    experts = tl.load(expert_ptr + j, mask=j < num_pairs, other=EXPERTS - 1)
    tl.store(count_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(experts, EXPERTS))
    alike = (experts[:, None] == experts[None, :]) & (i[None, :] < i[:, None])
    tl.store(rank_ptr + j, tl.sum(alike.to(tl.int32), 1), mask=j < num_pairs)


@triton.jit
def plan(
    expert_ptr,
    count_ptr,
    rank_ptr,
    order_ptr,
    tile_ptr,
    num_pairs,
    num_chunks,
    num_tiles,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Places a chunk's pairs in `order`. The first program writes the tiles: (expert, first position, rows); the rest
    of them have no rows. EXPERTS: a power of two greater than E.
    """
    e = tl.arange(0, EXPERTS)
    c = tl.arange(0, 16)
    i = tl.arange(0, CHUNK)
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    earlier = tl.zeros([EXPERTS], tl.int32)
    total = tl.zeros([EXPERTS], tl.int32)
    for start in tl.range(0, num_chunks, 16, num_stages=3):
        at = count_ptr + (start + c)[:, None] * EXPERTS + e[None, :]
        counts = tl.load(at, mask=(start + c < num_chunks)[:, None] & (e < E)[None, :], other=0)
        total += tl.sum(counts, 0)
        earlier += tl.sum(tl.where((start + c < tl.program_id(0))[:, None], counts, 0), 0)
    first = tl.cumsum(total) - total

    j = tl.program_id(0) * CHUNK + i
    expert = tl.load(expert_ptr + j, mask=j < num_pairs, other=EXPERTS - 1)
    rank = tl.load(rank_ptr + j, mask=j < num_pairs, other=0)
    tl.store(order_ptr + tl.gather(first + earlier, expert, 0) + rank, j, mask=j < num_pairs)

    if tl.program_id(0) == 0:
        tiles = tl.where(e < E, (total + BLOCK_T - 1) // BLOCK_T, 0)
        begin = tl.cumsum(tiles) - tiles
        for piece in range(tl.max(tiles)):
            entry = tile_ptr + (begin + piece) * 3
            tl.store(entry, e, mask=piece < tiles)
            tl.store(entry + 1, first + piece * BLOCK_T, mask=piece < tiles)
            tl.store(entry + 2, tl.minimum(total - piece * BLOCK_T, BLOCK_T), mask=piece < tiles)
        for n in range(tl.sum(tiles), num_tiles, EXPERTS):
            tl.store(tile_ptr + (n + e) * 3 + 2, tl.zeros_like(e), mask=n + e < num_tiles)


@triton.jit
def tile_at(tile_ptr, tile, T, A: tl.constexpr, SHARED_TILES, BLOCK_T: tl.constexpr):
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
    expert, first, count = tile_at(tile_ptr, tl.program_id(1), T, A, shared_tiles, BLOCK_T)
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
        h_scale, inverse = scale_of(tl.max(tl.abs(h), 0))
        h_fp8 = quotient(h, tl.broadcast_to(h_scale[None, :], h.shape), tl.broadcast_to(inverse[None, :], h.shape))
        tl.store(h_at, tl.trans(h_fp8), mask=here[:, None] & (f < F)[None, :])
        tl.store(h_scale_ptr + tl.program_id(0) * rows + row, h_scale, mask=here)
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
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T * A + T, D] = down(h) * weight, in x's dtype. A program does TILES tiles of BLOCK_D outputs.

    HELD: h, if short, is read once for all of them.
    """
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    expert, first, count = tile_at(tile_ptr, tl.program_id(1), T, A, shared_tiles, BLOCK_T)
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
    h_scale_at = h_scale_ptr + row
    hs, h_scales = (), ()
    if HELD:
        for block in tl.static_range(BLOCKS):
            hs = hs + (tl.load(h_at + block * 128, mask=(block * 128 + i < F)[:, None], other=0.0),)
            h_scales = h_scales + (tl.load(h_scale_at + block * rows) * weight,)
    start = tl.program_id(0) * TILES
    end = min(start + TILES, tl.cdiv(D, BLOCK_D))
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
