"""The experts of very many tokens with FP8 activations and weights, for dozens of rows per expert: as triton_tiles.py,
but tokens are the rows of the MMA tile.

A tile is up to BLOCK_T rows and reads its weights once; tiles of at most half as many rows use products of half the
size. With tokens as rows, a thread needs two activation scales instead of one per column; the weights' scale is one
number.
"""

import triton
import triton.language as tl

from glm5.kernels.grouped_experts.triton_plan import tile_at
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait, quotient, scale_of


@triton.jit
def _up(
    tile,
    x,
    weights,
    h,
    sizes,
    order_ptr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS rows of h, BLOCK_F values of each."""
    expert, first, count = tile
    x_ptr, x_scale_ptr = x
    gate_ptr, up_ptr, gate_scale_ptr, up_scale_ptr = weights
    h_ptr, h_scale_ptr = h
    T, D, F, scale_cols, rows = sizes
    r, i = tl.arange(0, ROWS), tl.arange(0, 128)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    here = r < count
    token = first - T * A + r
    if expert >= 0:
        token = tl.load(order_ptr + first + r, mask=here, other=0) // A
    token = tl.where(here, token, 0)
    at = tl.minimum(f, F - 1).to(tl.int64)[None, :] * D + i[:, None]
    gate_at, up_at = tl.multiple_of(gate_ptr, 16) + at, tl.multiple_of(up_ptr, 16) + at
    scale_at = (tl.program_id(0) * BLOCK_F // 128) * scale_cols
    x_at = x_ptr + token.to(tl.int64)[:, None] * D + i[None, :]
    gate, up = tl.zeros([ROWS, BLOCK_F], tl.float32), tl.zeros([ROWS, BLOCK_F], tl.float32)
    for block in tl.range(scale_cols, num_stages=STAGES):
        inside = block * 128 + i < D
        rows_TD = tl.load(x_at + block * 128, mask=here[:, None] & inside[None, :], other=0.0)
        gate_w = tl.load(gate_at + block * 128, mask=inside[:, None], other=0.0)
        up_w = tl.load(up_at + block * 128, mask=inside[:, None], other=0.0)
        x_scale = tl.load(x_scale_ptr + block * T + token)
        gate += tl.dot(rows_TD, gate_w) * (x_scale * tl.load(gate_scale_ptr + scale_at + block))[:, None]
        up += tl.dot(rows_TD, up_w) * (x_scale * tl.load(up_scale_ptr + scale_at + block))[:, None]
    value = tl.where((f < F)[None, :], gate / (1 + tl.exp(-gate)) * up, 0.0)
    row = first + r
    h_at = h_ptr + row.to(tl.int64)[:, None] * F + f[None, :]
    if BLOCK_F == 128:
        h_scale, inverse = scale_of(tl.max(tl.abs(value), 1))
        wide, inverse = tl.broadcast_to(h_scale[:, None], value.shape), tl.broadcast_to(inverse[:, None], value.shape)
        tl.store(h_at, quotient(value, wide, inverse), mask=here[:, None] & (f < F)[None, :])
        tl.store(h_scale_ptr + tl.program_id(0) * rows + row, h_scale, mask=here)
    else:
        tl.store(h_at, value.to(h_ptr.dtype.element_ty), mask=here[:, None] & (f < F)[None, :])


@triton.jit
def gate_up_rows(
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
    """As `gate_up_tiles`."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    expert, first, count = tile_at(tile_ptr, tl.program_id(1), T, A, shared_tiles, BLOCK_T)
    if count == 0:
        return
    scale_rows = tl.cdiv(F, 128)
    if expert < 0:
        gate_ptr, up_ptr = shared_gate_ptr, shared_up_ptr
        gate_scale_ptr, up_scale_ptr = shared_gate_scale_ptr, shared_up_scale_ptr
    else:
        gate_ptr = w_ptr + expert.to(tl.int64) * 2 * F * D
        up_ptr = gate_ptr + F.to(tl.int64) * D
        gate_scale_ptr = scale_ptr + expert * 2 * scale_rows * scale_cols
        up_scale_ptr = gate_scale_ptr + scale_rows * scale_cols
    tile, x, h = (expert, first, count), (x_ptr, x_scale_ptr), (h_ptr, h_scale_ptr)
    weights, sizes = (gate_ptr, up_ptr, gate_scale_ptr, up_scale_ptr), (T, D, F, scale_cols, rows)
    if (count <= BLOCK_T // 2) & (BLOCK_T > 64):
        _up(tile, x, weights, h, sizes, order_ptr, A, max(64, BLOCK_T // 2), BLOCK_F, STAGES)
    else:
        _up(tile, x, weights, h, sizes, order_ptr, A, BLOCK_T, BLOCK_F, STAGES)


@triton.jit
def _down(
    tile,
    h,
    weights,
    y_ptr,
    sizes,
    order_ptr,
    weight_ptr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS rows of y, TILES times BLOCK_D outputs of each."""
    expert, first, count = tile
    h_ptr, h_scale_ptr = h
    w_ptr, scale_ptr = weights
    D, F, rows = sizes
    r, i, d = tl.arange(0, ROWS), tl.arange(0, 128), tl.arange(0, BLOCK_D)
    here = r < count
    row = tl.where(here, first + r, first).to(tl.int64)
    pair = first + r
    weight = tl.full([ROWS], 1.0, tl.float32)
    if expert >= 0:
        pair = tl.load(order_ptr + first + r, mask=here, other=0)
        weight = tl.load(weight_ptr + pair, mask=here, other=0.0)
    w_ptr = tl.multiple_of(w_ptr, 16)
    h_at = h_ptr + row[:, None] * F + i[None, :]
    y_at = y_ptr + pair.to(tl.int64)[:, None] * D + d[None, :]
    h_scale_at = h_scale_ptr + row
    hs, h_scales = (), ()
    if HELD:
        for block in tl.static_range(BLOCKS):
            known = here[:, None] & (block * 128 + i < F)[None, :]
            hs = hs + (tl.load(h_at + block * 128, mask=known, other=0.0),)
            h_scales = h_scales + (tl.load(h_scale_at + block * rows) * weight,)
    start = tl.program_id(0) * TILES
    end = min(start + TILES, tl.cdiv(D, BLOCK_D))
    for step in tl.range(start, end, num_stages=STAGES if HELD else 1):
        output = tl.minimum(step * BLOCK_D + d, D - 1).to(tl.int64)
        w_at = w_ptr + output[None, :] * F + i[:, None]
        scale_at = scale_ptr + (step * BLOCK_D // 128) * BLOCKS
        y = tl.zeros([ROWS, BLOCK_D], tl.float32)
        if HELD:
            for block in tl.static_range(BLOCKS):
                w = tl.load(w_at + block * 128, mask=(block * 128 + i < F)[:, None], other=0.0)
                y += tl.dot(hs[block], w) * (h_scales[block] * tl.load(scale_at + block))[:, None]
        else:
            for block in tl.range(BLOCKS, num_stages=STAGES):
                inside = block * 128 + i < F
                w = tl.load(w_at + block * 128, mask=inside[:, None], other=0.0)
                x = tl.load(h_at + block * 128, mask=here[:, None] & inside[None, :], other=0.0)
                scale = tl.load(h_scale_at + block * rows) * weight * tl.load(scale_at + block)
                y += tl.dot(x, w) * scale[:, None]
        stored = here[:, None] & (step * BLOCK_D + d < D)[None, :]
        tl.store(y_at + step * BLOCK_D, y.to(y_ptr.dtype.element_ty), mask=stored)


@triton.jit
def down_rows(
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
    TILE_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `down_tiles`; a tile of TILE_T rows goes to several programs of BLOCK_T."""
    PARTS: tl.constexpr = TILE_T // BLOCK_T
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    expert, first, count = tile_at(tile_ptr, tl.program_id(1) // PARTS, T, A, shared_tiles, TILE_T)
    before = tl.program_id(1) % PARTS * BLOCK_T
    if count <= before:
        return
    first += before
    count = min(count - before, BLOCK_T)
    if expert < 0:
        at_ptr, at_scale_ptr = shared_ptr, shared_scale_ptr
    else:
        at_ptr = w_ptr + expert.to(tl.int64) * F * D
        at_scale_ptr = scale_ptr + expert * tl.cdiv(D, 128) * BLOCKS
    tile, h, weights = (expert, first, count), (h_ptr, h_scale_ptr), (at_ptr, at_scale_ptr)
    sizes = (D, F, rows)
    _down(tile, h, weights, y_ptr, sizes, order_ptr, weight_ptr, BLOCK_T, BLOCK_D, BLOCKS, TILES, HELD, STAGES)
