"""sparse_mla on a GPU, in Triton: split over keys, merged in a fixed order.

A program computes a split of the keys of one query, or, if every visible key is read, of several consecutive queries.
Its rows are (query, head) pairs, 16 of one query (the MMA minimum; a rank may have 8 heads) or 64 of several:

    logits[r, n] = q[r] . latent[n]        out[r, c] = sum_n p[r, n] latent[n, c]

A latent is loaded to shared memory once for both products, in groups of 128 values, because more would not fit in
registers. FP8 latents are prefetched as bytes and dequantized to q's dtype; 128 values have one scale. Softmax is in
float32 with base 2. Splits are merged in order: few by the last program to arrive, many by a second kernel. The number
of splits depends on shapes only, so results are deterministic.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.block_scaled import BLOCK, FP8
from glm5.kernels.fp8_pool import ROPE_DTYPE, Fp8Keys, Fp8Latents, Pool
from glm5.kernels.triton_fp8 import last_to_arrive, materialize, pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import NUM_ARRIVALS, arrivals, dependent_launch, multiprocessors

_SHARED_ROWS = 64
_FEW_SHARES = 4  # that a program merges; of more, many programs do it sooner
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def _keys(block, keys_ptr, num_keys, SELECTED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of a block, -1 for none."""
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if SELECTED:
        key = tl.load(keys_ptr + key, mask=key < num_keys, other=-1)
    return key


@triton.jit
def _slots(key, pages_ptr, end, Z: tl.constexpr):
    """(whether a key is one and may be read, its page, its place there)."""
    known = (key >= 0) & (key < end)
    return known, tl.load(pages_ptr + key // Z, mask=known, other=0).to(tl.int64), key % Z


@triton.jit
def _rows(x, known, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr):
    """Rows at `x` in GROUPS pieces. Zeros in place of unknown ones: NaN may lie there."""
    c, pieces = tl.arange(0, BLOCK_C)[None, :], ()
    for g in tl.static_range(GROUPS):
        mask = known[:, None] & (g * BLOCK_C + c < WIDTH)
        pieces = pieces + (tl.load(x[:, None] + (g * BLOCK_C + c), mask=mask, other=0.0),)
    return pieces


@triton.jit
def _bytes(
    known,
    page,
    slot,
    latent_ptr,
    scale_ptr,
    rope_ptr,
    page_stride,
    row_stride,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """FP8 latents: (values, scales, rotated part). Strides are in bytes, pointers each of its part's type."""
    values_GNC = _rows(latent_ptr + (page * page_stride + slot * row_stride), known, C, BLOCK_C, GROUPS)
    scale, scale_GN = scale_ptr + (page * (page_stride // 4) + slot * (row_stride // 4)), ()
    for g in tl.static_range(GROUPS):
        scale_GN = scale_GN + (tl.load(scale + g, mask=known, other=0.0),)
    rope_1NR = _rows(rope_ptr + (page * (page_stride // 2) + slot * (row_stride // 2)), known, R, BLOCK_R, 1)
    return values_GNC, scale_GN, rope_1NR[0]


@triton.jit
def _widened(bytes_GNC, scale_GN, GROUPS: tl.constexpr, dtype: tl.constexpr):
    values_GNC = ()
    for g in tl.static_range(GROUPS):
        values_GNC = values_GNC + (materialize((bytes_GNC[g].to(tl.float32) * scale_GN[g][:, None]).to(dtype)),)
    return values_GNC


@triton.jit
def _add(q_GHC, q_HR, values_GNC, rope_NR, seen_HN, scale, top_H, sum_H, out_GHC, GROUPS: tl.constexpr):
    """(largest logit, sum of exponentials, sums of values) with those of a block of keys."""
    # Two chains of products wait for one another half as long as one.
    even_HN = tl.dot(q_GHC[0], tl.trans(values_GNC[0]), input_precision="ieee")
    odd_HN = tl.dot(q_HR, tl.trans(rope_NR), input_precision="ieee")
    for g in tl.static_range(1, GROUPS):
        if g % 2 == 0:
            even_HN = tl.dot(q_GHC[g], tl.trans(values_GNC[g]), even_HN, input_precision="ieee")
        else:
            odd_HN = tl.dot(q_GHC[g], tl.trans(values_GNC[g]), odd_HN, input_precision="ieee")
    logits_HN = tl.where(seen_HN, even_HN * scale + odd_HN * scale, -1e30)
    new_top_H = tl.maximum(top_H, tl.max(logits_HN, axis=1))
    p_HN = tl.where(seen_HN, tl.exp2(logits_HN - new_top_H[:, None]), 0.0)
    shrink_H = tl.exp2(top_H - new_top_H)
    sum_H = sum_H * shrink_H + tl.sum(p_HN, axis=1)
    p_HN, new_GHC = p_HN.to(q_HR.dtype), ()
    for g in tl.static_range(GROUPS):
        old_HC = out_GHC[g] * shrink_H[:, None]
        new_GHC = new_GHC + (tl.dot(p_HN, values_GNC[g], old_HC, input_precision="ieee"),)
    return new_top_H, sum_H, new_GHC


@triton.jit
def _add_blocks(
    q,
    sums,
    start,
    stop,
    keys,
    pool,
    valid,
    end,
    scale,
    C: tl.constexpr,
    R: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """`sums` with blocks start..stop-1. keys: where they and their pages are; pool: pointers, strides; valid, end: of
    each row."""
    q_GHC, q_HR = q
    top_H, sum_H, out_GHC = sums
    keys_ptr, num_keys, pages_ptr, last_end = keys
    latent_ptr, _, rope_ptr, page_stride, row_stride = pool
    for block in range(start, stop):
        key_N = _keys(block, keys_ptr, num_keys, SELECTED, BLOCK_N)
        known_N, page_N, slot_N = _slots(key_N, pages_ptr, last_end, Z)
        at = page_N * page_stride + slot_N * row_stride
        values_GNC = _rows(latent_ptr + at, known_N, C, BLOCK_C, GROUPS)
        rope_1NR = _rows(rope_ptr + at, known_N, R, BLOCK_R, 1)
        seen_HN = known_N[None, :] & (valid[:, None] & (key_N[None, :] < end[:, None]))
        top_H, sum_H, out_GHC = _add(
            q_GHC, q_HR, values_GNC, rope_1NR[0], seen_HN, scale, top_H, sum_H, out_GHC, GROUPS
        )
    return top_H, sum_H, out_GHC


@triton.jit
def _add_fp8_blocks(
    q,
    sums,
    start,
    stop,
    keys,
    pool,
    valid,
    end,
    scale,
    C: tl.constexpr,
    R: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """As `_add_blocks`."""
    q_GHC, q_HR = q
    top_H, sum_H, out_GHC = sums
    keys_ptr, num_keys, pages_ptr, last_end = keys
    for block in range(start, stop):
        key_N = _keys(block, keys_ptr, num_keys, SELECTED, BLOCK_N)
        known_N, page_N, slot_N = _slots(key_N, pages_ptr, last_end, Z)
        bytes_GNC, scale_GN, rope_NR = _bytes(known_N, page_N, slot_N, *pool, C, R, BLOCK_C, BLOCK_R, GROUPS)
        values_GNC, rope_NR = _widened(bytes_GNC, scale_GN, GROUPS, q_HR.dtype), rope_NR.to(q_HR.dtype)
        seen_HN = known_N[None, :] & (valid[:, None] & (key_N[None, :] < end[:, None]))
        top_H, sum_H, out_GHC = _add(q_GHC, q_HR, values_GNC, rope_NR, seen_HN, scale, top_H, sum_H, out_GHC, GROUPS)
    return top_H, sum_H, out_GHC


@triton.jit
def _store(out_ptr, lse_ptr, at, real, top_H, sum_H, out_GHC, lse_unit, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Store the result of a split: zeros and -inf if no key is visible."""
    divisor_H = tl.where(sum_H > 0, sum_H, 1.0)
    tl.store(lse_ptr + at, tl.where(sum_H > 0, (top_H + tl.log2(divisor_H)) * lse_unit, float("-inf")), mask=real)
    for g in tl.static_range(len(out_GHC)):
        c = g * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        out_HC = (out_GHC[g] / divisor_H[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * C + c, out_HC, mask=real[:, None] & (c < C))


@triton.jit
def _merge_few(
    part, whole, t, h, real, num_shares, H: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr
):
    """Rows (t, h) from their shares. part, whole: pointers to results and their lse."""
    part_ptr, part_lse_ptr = part
    top_H, sum_H, out_GHC = tl.full(h.shape, -1e30, tl.float32), tl.zeros(h.shape, tl.float32), ()
    for _ in tl.static_range(GROUPS):
        out_GHC = out_GHC + (tl.zeros([h.shape[0], BLOCK_C], tl.float32),)
    c = tl.arange(0, BLOCK_C)[None, :]
    for share in range(num_shares):
        at = (t * num_shares + share) * H + h
        lse_H = tl.load(part_lse_ptr + at, mask=real, other=float("-inf"), cache_modifier=".cg")
        new_top_H = tl.maximum(top_H, lse_H)
        shrink_H, weight_H, new_GHC = tl.exp2(top_H - new_top_H), tl.exp2(lse_H - new_top_H), ()
        for g in tl.static_range(GROUPS):
            mask = real[:, None] & (g * BLOCK_C + c < C)
            its_HC = tl.load(part_ptr + at[:, None] * C + g * BLOCK_C + c, mask=mask, other=0.0, cache_modifier=".cg")
            new_GHC = new_GHC + (out_GHC[g] * shrink_H[:, None] + its_HC * weight_H[:, None],)
        top_H, sum_H, out_GHC = new_top_H, sum_H * shrink_H + weight_H, new_GHC
    _store(*whole, t * H + h, real, top_H, sum_H, out_GHC, _LN2, C, BLOCK_C)


@triton.jit
def _attend(
    q_ptr,
    keys_ptr,
    latent_ptr,
    scale_ptr,
    rope_ptr,
    table_ptr,
    row_ptr,
    end_ptr,
    out_ptr,
    lse_ptr,
    whole_ptr,
    whole_lse_ptr,
    arrivals_ptr,
    num_queries,
    num_columns,
    num_keys,
    page_stride,
    row_stride,
    num_shares,
    qk_scale,
    lse_unit,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    Z: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
    SELECTED: tl.constexpr,
    ASCENDING: tl.constexpr,
    IS_FP8: tl.constexpr,
    MERGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, share, h] and lse[t, share, h] (times its unit, from base 2). Strides are in the pool's elements.

    MERGES: the last program to arrive at a tile makes whole[t, h] of its shares.

    program_id(0): share of the keys; (1): tile of queries, the last first; (2): block of heads.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    share, tile, pair = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.arange(0, BLOCK_H)
    place, h = (pair // H) * (QUERIES > 1), tl.program_id(2) * BLOCK_H + (pair % H if QUERIES > 1 else pair)
    t = (tile * QUERIES + place).to(tl.int64)
    real = (t < num_queries) & (place < QUERIES) & (h < H)
    row, end = tl.load(row_ptr + t, mask=real, other=-1), tl.load(end_ptr + t, mask=real, other=0)
    q_GHC = _rows(q_ptr + (t * H + h) * (C + R), real, C, BLOCK_C, GROUPS)
    q_1HR = _rows(q_ptr + (t * H + h) * (C + R) + C, real, R, BLOCK_R, 1)
    pool = latent_ptr, scale_ptr, rope_ptr, page_stride, row_stride
    top_H, sum_H, out_GHC = tl.full([BLOCK_H], -1e30, tl.float32), tl.zeros([BLOCK_H], tl.float32), ()
    for _ in tl.static_range(GROUPS):
        out_GHC = out_GHC + (tl.zeros([BLOCK_H, BLOCK_C], tl.float32),)

    for first in range(QUERIES):
        # The request of the tile's query `first`; nothing is left to do if an earlier query has the same.
        its_row = tl.max(tl.where(place == first, row, -1), axis=0)
        is_new = tl.min(tl.where(row == its_row, place, QUERIES), axis=0) == first
        last_end = tl.max(tl.where((row == its_row) & is_new, end, 0), axis=0)
        # Of selected keys all, also for a query that sees none: they are on their way before its end is known.
        most = tl.minimum(num_keys, last_end) if ASCENDING else num_keys
        blocks = tl.cdiv(most if SELECTED else last_end, BLOCK_N)
        a_share = tl.cdiv(blocks, num_shares)
        start, stop = share * a_share, tl.minimum((share + 1) * a_share, blocks)
        pages_ptr = table_ptr + its_row.to(tl.int64) * num_columns
        keys = keys_ptr + tile.to(tl.int64) * num_keys, num_keys, pages_ptr, last_end
        add_blocks: tl.constexpr = _add_fp8_blocks if IS_FP8 else _add_blocks
        what = (q_GHC, q_1HR[0]), (top_H, sum_H, out_GHC), start, stop, keys, pool, row == its_row, end, qk_scale
        top_H, sum_H, out_GHC = add_blocks(*what, C, R, Z, BLOCK_N, BLOCK_C, BLOCK_R, GROUPS, SELECTED)

    at = (t * num_shares + share) * H + h
    _store(out_ptr, lse_ptr, at, real, top_H, sum_H, out_GHC, lse_unit, C, BLOCK_C)
    if MERGES:  # noqa: SIM102 - known to the compiler, and the other is not
        if last_to_arrive(arrivals_ptr, tl.program_id(1) * tl.num_programs(2) + tl.program_id(2), num_shares):
            part, whole = (out_ptr, lse_ptr), (whole_ptr, whole_lse_ptr)
            _merge_few(part, whole, t, h, real, num_shares, H, C, BLOCK_C, GROUPS)


@triton.jit
def _merge(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    SHARES,
    H: tl.constexpr,
    C: tl.constexpr,
    LN2: tl.constexpr,
    BLOCK_SHARES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, h] and lse[t, h] from their shares: program_id(0) is t * H + h."""
    t, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    s, c = tl.arange(0, BLOCK_SHARES), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    place_S = (t * SHARES + s) * H + h
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    lse_S = tl.load(part_lse_ptr + place_S, mask=s < SHARES, other=float("-inf"))
    known = (s[:, None] < SHARES) & (c[None, :] < C)
    part_SC = tl.load(part_ptr + place_S[:, None] * C + c[None, :], mask=known, other=0.0)
    top = tl.maximum(tl.max(lse_S, axis=0), -1e30)
    weight_S = tl.exp2(lse_S - top)
    total = tl.sum(weight_S, axis=0)
    divisor = tl.where(total > 0, total, 1.0)
    out_C = tl.sum(part_SC * weight_S[:, None], axis=0) / divisor
    tl.store(out_ptr + (t * H + h) * C + c, out_C.to(out_ptr.dtype.element_ty), mask=c < C)
    if tl.program_id(1) == 0:
        lse = tl.where(total > 0, (top + tl.log2(divisor)) * LN2, float("-inf"))
        tl.store(lse_ptr + t * H + h, lse)


class Tiling(NamedTuple):
    """Tile sizes of a program, and programs per multiprocessor."""

    queries: int
    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    registers: int = 0
    """Maximum registers per thread; 0: the compiler's choice."""


def tiling_for(q_THL: Tensor, is_fp8: bool, many_queries: bool) -> Tiling:
    """Without an entry in `kernels/tuned`: what was fastest on an H200 at GLM-5's sizes.

    `many_queries`: queries in a row read the same keys.
    """
    num_heads = q_THL.shape[1]
    if q_THL.element_size() == 4:  # products of float32 take registers where others take matrix units
        return Tiling(1, 16, 16, warps=4, stages=2, programs=1)
    if many_queries and num_heads <= _SHARED_ROWS // 2:
        return Tiling(_SHARED_ROWS // num_heads, _SHARED_ROWS, 64, warps=8, stages=2, programs=1)
    if is_fp8:
        return Tiling(1, 16, 32, warps=4, stages=4, programs=2)
    return Tiling(1, 16, 64, warps=4, stages=3, programs=2)


def sparse_mla(
    q_THL: Tensor,
    latent_PZL: Pool,
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    value_dim: int,
    num_shares: int | None = None,
    is_ascending: bool = False,
    tile: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.sparse_mla`, without a gradient. `is_ascending`: selected keys are, with -1 behind them, so that a
    query that sees few does not look at all places.

    `num_shares`: pieces that a query's keys are cut into (None: as many as fill the GPU); with a given number, its
    result does not depend on how many other queries there are. Raises ValueError for pools that it cannot read.
    """
    (num_queries, H, _), page_size = q_THL.shape, latent_PZL.shape[1]
    num_keys = page_table_BN.shape[1] * page_size if keys_TK is None else keys_TK.shape[1]
    many_queries = keys_TK is None and num_queries >= 2 * page_table_BN.shape[0]
    is_fp8 = isinstance(latent_PZL, Fp8Latents)
    if tile is None and num_shares is None and q_THL.element_size() == 2:
        sizes = f"H={H} C={value_dim}{' fp8' if is_fp8 else ''}{' many_queries' if many_queries else ''}"
        tile = tuned.find(Tiling, "sparse_mla", sizes, num_queries, q_THL.device)
    tile = tile or tiling_for(q_THL, is_fp8, many_queries)
    tiles, head_blocks = triton.cdiv(num_queries, tile.queries), triton.cdiv(H, tile.rows)
    if num_shares is None:
        wanted = tile.programs * multiprocessors(q_THL.device) // max(1, tiles * head_blocks)
        num_shares = max(1, min(wanted, triton.cdiv(num_keys, tile.keys)))
    out_THC = q_THL.new_empty(num_queries, H, value_dim)
    lse_TH = q_THL.new_empty(num_queries, H, dtype=torch.float32)
    if num_queries == 0:
        return out_THC, lse_TH
    part, part_lse = out_THC, lse_TH
    if num_shares > 1:
        part = q_THL.new_empty(num_queries, num_shares, H, value_dim, dtype=torch.float32)
        part_lse = q_THL.new_empty(num_queries, num_shares, H, dtype=torch.float32)
    values, scales, rope = _parts(latent_PZL, value_dim)
    # Programs that wait for earlier ones take the places of those that work, where there are enough to fill the GPU.
    fills = tiles * head_blocks * num_shares > multiprocessors(q_THL.device)
    launch = {"PDL": False} if fills else dependent_launch(q_THL.device)
    merges = 1 < num_shares <= _FEW_SHARES and tiles * head_blocks <= NUM_ARRIVALS
    _attend[(num_shares, tiles, head_blocks)](
        q_THL.contiguous(),
        end_T if keys_TK is None else keys_TK.contiguous(),
        values,
        scales,
        rope,
        page_table_BN.contiguous(),
        row_T,
        end_T,
        part,
        part_lse,
        out_THC,
        lse_TH,
        arrivals(q_THL.device),
        num_queries,
        page_table_BN.shape[1],
        num_keys,
        values.stride(0),
        values.stride(1),
        num_shares,
        scale * math.log2(math.e),
        math.log(2) if num_shares == 1 else 1.0,
        SELECTED=keys_TK is not None,
        ASCENDING=is_ascending,
        MERGES=merges,
        **_constants(q_THL, latent_PZL, value_dim, tile),
        **launch,
    )
    if num_shares > 1 and not merges:
        merge(part, part_lse, out_THC, lse_TH, launch)
    return out_THC, lse_TH


def merge(part: Tensor, part_lse: Tensor, out_THC: Tensor, lse_TH: Tensor, launch: dict[str, bool]) -> None:
    """Merge splits in order: part [T, splits, H, C], part_lse [T, splits, H] in base 2."""
    num_queries, num_shares, H, value_dim = part.shape
    sizes = {"H": H, "C": value_dim, "BLOCK_C": BLOCK, "BLOCK_SHARES": triton.next_power_of_2(num_shares)}
    _merge[(num_queries * H, triton.cdiv(value_dim, BLOCK))](
        part, part_lse, out_THC, lse_TH, num_shares, LN2=math.log(2), **sizes, **launch
    )


def _constants(q_THL: Tensor, pool: Pool, value_dim: int, tile: Tiling) -> dict[str, int | bool]:
    """Constants of `_attend` and options of its launch. A product takes 16 values at least."""
    rope_dim = q_THL.shape[2] - value_dim
    return {
        "H": q_THL.shape[1],
        "C": value_dim,
        "R": rope_dim,
        "Z": pool.shape[1],
        "QUERIES": tile.queries,
        "BLOCK_N": tile.keys,
        "BLOCK_H": tile.rows,
        "BLOCK_C": max(16, triton.next_power_of_2(min(BLOCK, value_dim))),
        "BLOCK_R": max(16, triton.next_power_of_2(rope_dim)),
        "GROUPS": triton.cdiv(value_dim, BLOCK),
        "IS_FP8": isinstance(pool, Fp8Latents),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **({"maxnreg": tile.registers} if tile.registers else {}),
    }


def _parts(pool: Pool, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values, scales, rotated part) of a pool, each beginning at its first row; scales are anything but for FP8."""
    if isinstance(pool, Fp8Keys):
        raise ValueError("sparse_mla[triton] reads latents, got a pool of index keys; use impl='gather'")
    if isinstance(pool, Fp8Latents):
        form = pool.format
        if value_dim != form.num_values:
            raise ValueError(f"sparse_mla[triton] needs value_dim = {form.num_values} of this pool, got {value_dim}")
        values = pool.row[..., : form.num_values].view(FP8)
        scales = pool.row[..., form.scales_at : form.rope_at].view(torch.float32)
        return values, scales, pool.row[..., form.rope_at : form.num_bytes].view(ROPE_DTYPE)
    if pool.stride(2) != 1:
        raise ValueError(f"sparse_mla[triton] needs rows in one piece, got a pool with strides {pool.stride()}")
    return pool, pool, pool[..., value_dim:]
