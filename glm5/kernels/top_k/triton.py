"""top_k on a GPU, in Triton: one program a row, which finds the k-th best score by counting.

Scores are compared as integers of the same order. With all of a row in registers, a step counts how many are at least
m1, and at least m2, and keeps the third of the range in which the k-th lies: about 12 steps, 20 at most, fewer than k
once the count is right by itself. A running sum over the row then gives every chosen key its place, in index order.

A long row goes through the largest score of each group of neighbours first. The k best keys lie in the k best groups,
by (larger maximum, then smaller index): of a key in any other group, k keys are better, one in each of them. So two
searches of 16k values each do for rows of 128k.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 8  # neighbours; a power of two
# Scores that a program of 1,024 threads holds, 32 a thread.
_WIDEST, _ABSENT = 32768, tl.constexpr(-(2**31))


@triton.jit
def _ranked(score):
    """int32 of the scores' order: NaN above all, zeros of both signs alike, -inf as `_ABSENT`, below all."""
    score = tl.where(score == 0.0, 0.0, score.to(tl.float32))
    bits = score.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = tl.where(score != score, 0x7FC00000, rank)
    return tl.where(score == float("-inf"), _ABSENT, rank)


@triton.jit
def _threshold(rank_S, k):
    """(least rank that is chosen, how many of those that have it)."""
    present = rank_S > _ABSENT
    low_count = tl.sum(present.to(tl.int32), axis=0)
    # At least k have rank `low` or more, fewer than k `high` or more.
    high = tl.max(rank_S, axis=0).to(tl.int64) + 1
    low = tl.minimum(tl.min(tl.where(present, rank_S, 0x7FFFFFFF), axis=0).to(tl.int64), high - 1)
    high_count = tl.zeros_like(low_count)
    while (high - low > 1) & (low_count > k):
        third = ((high - low) * 21845) >> 16
        m1 = tl.minimum(tl.maximum(low + third, low + 1), high - 1)
        m2 = tl.minimum(tl.maximum(low + 2 * third, m1), high - 1)
        at_least_m1 = (rank_S >= m1.to(tl.int32)).to(tl.int32)
        counts = tl.sum(at_least_m1 + ((rank_S >= m2.to(tl.int32)).to(tl.int32) << 16), axis=0)
        count1, count2 = counts & 0xFFFF, (counts >> 16) & 0xFFFF
        high = tl.where(count2 >= k, high, tl.where(count1 >= k, m2, m1))
        high_count = tl.where(count2 >= k, high_count, tl.where(count1 >= k, count2, count1))
        low = tl.where(count2 >= k, m2, tl.where(count1 >= k, m1, low))
        low_count = tl.where(count2 >= k, count2, tl.where(count1 >= k, count1, low_count))
    return low.to(tl.int32), tl.where(low_count > k, k - high_count, 0xFFFF)


@triton.jit
def _put_best(rank_S, index_S, out_ptr, k, BLOCK_K: tl.constexpr):
    """Writes the `k` best indices of rows in index order, then -1."""
    least, wanted = _threshold(rank_S, k)
    better = (rank_S > least).to(tl.int32)
    equal = ((rank_S == least) & (rank_S > _ABSENT)).to(tl.int32)
    counts_S = tl.cumsum(better + (equal << 16), axis=0)
    equals_S = (counts_S >> 16) & 0xFFFF
    place_S = (counts_S & 0xFFFF) + tl.minimum(equals_S, wanted) - 1
    chosen_S = (better + equal > 0) & ((better > 0) | (equals_S <= wanted))
    tl.store(out_ptr + place_S, index_S, mask=chosen_S)
    num_chosen = tl.max(place_S, axis=0) + 1
    rest = tl.arange(0, BLOCK_K)
    tl.store(out_ptr + rest, tl.full([BLOCK_K], -1, tl.int32), mask=(rest >= num_chosen) & (rest < k))


@triton.jit
def _best(
    score_ptr,
    best_ptr,
    end_ptr,
    groups_ptr,
    out_ptr,
    num_keys,
    score_stride,
    best_stride,
    k,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_END: tl.constexpr,
    IS_LONG: tl.constexpr,
):
    """Best keys of row program_id(0), of which the first end_ptr[row] scores count."""
    t = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(end_ptr + t), num_keys) if HAS_END else num_keys
    i = tl.arange(0, WIDTH)
    if IS_LONG:
        num_groups = tl.cdiv(end, GROUP)
        rank_G = _ranked(tl.load(best_ptr + t * best_stride + i, mask=i < num_groups, other=float("-inf")))
        _put_best(rank_G, i, groups_ptr + t * k, k, BLOCK_K)
        tl.debug_barrier()
        place = tl.arange(0, BLOCK_K * GROUP)
        group = tl.load(groups_ptr + t * k + place // GROUP, mask=place // GROUP < k, other=-1)
        i = group * GROUP + place % GROUP
        in_row = (group >= 0) & (i < end)
    else:
        in_row = i < end
    rank_S = _ranked(tl.load(score_ptr + t * score_stride + i, mask=in_row, other=float("-inf")))
    _put_best(rank_S, i, out_ptr + t * k, k, BLOCK_K)


@triton.jit
def _group_best(score_ptr, best_ptr, num_keys, score_stride, best_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """best[t, g] = the largest score of a group, a NaN if it has one."""
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    score = tl.load(score_ptr + t * score_stride + s, mask=s < num_keys, other=float("-inf")).to(tl.float32)
    best = tl.max(score, axis=1)
    best = tl.where(tl.max((score != score).to(tl.int32), axis=1) > 0, float("nan"), best)
    tl.store(best_ptr + t * best_stride + g, best, mask=g < best_stride)


def top_k(score_TS: Tensor, k: int, *, longest: int = _WIDEST // 2) -> Tensor:
    """As `reference.top_k`. Rows of more than `longest` scores go through groups.

    Raises ValueError for scores wider than float32, and for k or rows that are too long for it.
    """
    if score_TS.dtype == torch.float64:
        raise ValueError("top_k[triton] compares float32, got float64 scores; use impl='reference'")
    score_TS = score_TS.detach().contiguous()
    num_rows, num_keys = score_TS.shape
    best = None
    if num_keys > longest and num_rows:
        num_groups = triton.cdiv(num_keys, GROUP)
        best = score_TS.new_empty(num_rows, num_groups, dtype=torch.float32)
        grid = (num_rows, triton.cdiv(num_groups, 256))
        _group_best[grid](score_TS, best, num_keys, score_TS.stride(0), num_groups, GROUP=GROUP, BLOCK=256)
    return best_of(score_TS, best, None, k)


def best_of(score_TS: Tensor, best_TG: Tensor | None, end_T: Tensor | None, k: int) -> Tensor:
    """Best keys of rows, int32 [T, k]; of rows of which the best of each group is given, by way of those."""
    num_rows, num_keys = score_TS.shape
    block_k = triton.next_power_of_2(k)
    width = triton.next_power_of_2(num_keys if best_TG is None else best_TG.shape[1])
    widest = width if best_TG is None else max(width, block_k * GROUP)
    if widest > _WIDEST:
        raise ValueError(
            f"top_k[triton] takes rows of up to {_WIDEST * GROUP} scores and k up to {_WIDEST // GROUP} of long rows, "
            f"got {num_keys} scores and k={k}; use impl='reference'"
        )
    out_TK = torch.empty(num_rows, k, dtype=torch.int32, device=score_TS.device)
    groups_TK = out_TK if best_TG is None else torch.empty_like(out_TK)
    if num_rows == 0:
        return out_TK
    _best[(num_rows,)](
        score_TS,
        score_TS if best_TG is None else best_TG,
        out_TK if end_T is None else end_T,
        groups_TK,
        out_TK,
        num_keys,
        score_TS.stride(0),
        0 if best_TG is None else best_TG.stride(0),
        k,
        GROUP=GROUP,
        WIDTH=width,
        BLOCK_K=block_k,
        HAS_END=end_T is not None,
        IS_LONG=best_TG is not None,
        num_warps=min(32, max(4, widest // 256)),
    )
    return out_TK
