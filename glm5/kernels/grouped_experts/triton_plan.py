"""Sorts (token, choice) pairs by expert and splits them into tiles, in two kernels, for very many tokens.

`order` lists the (token, choice) pairs by expert, in ascending order within one. A tile is up to BLOCK_T of them, or of
the tokens at the shared expert, which come after all pairs: position T * A + t.
"""

import triton
import triton.language as tl

from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait


@triton.jit
def count(expert_ptr, count_ptr, rank_ptr, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """count [chunks, EXPERTS]: the number of a chunk's pairs by expert; padding counts for the last one.
    rank [pairs]: the number of earlier pairs of the same chunk and expert.
    """
    i = tl.arange(0, CHUNK)
    j = tl.program_id(0) * CHUNK + i
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    experts = tl.load(expert_ptr + j, mask=j < num_pairs, other=EXPERTS - 1)
    tl.store(count_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(experts, EXPERTS))
    is_earlier = (experts[:, None] == experts[None, :]) & (i[None, :] < i[:, None])
    tl.store(rank_ptr + j, tl.sum(is_earlier.to(tl.int32), 1), mask=j < num_pairs)


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
    """Writes a chunk's pairs to their positions in `order`. The first program writes the tiles (expert, first position,
    rows), unused ones without rows, then the number of used ones. EXPERTS: a power of two greater than E.
    """
    e = tl.arange(0, EXPERTS)
    c = tl.arange(0, 16)
    i = tl.arange(0, CHUNK)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
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
        tl.store(tile_ptr + num_tiles * 3, tl.sum(tiles))


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
