"""top_k on a GPU, in Triton: one program a row, which finds the k-th best score by counting.

Scores are compared as integers of the same order. With a row in registers, a step counts how many are at least m1, and
at least m2, and goes on with the range that holds the k-th; m1 and m2 lie about where it would be if scores were spread
evenly, or, where that gets nowhere, at the thirds of the range. Six to eight steps for random scores. A running sum
over the row then gives every chosen key its place, in index order.

Of long rows, groups of neighbours come first, about 4,096 of them. If k groups have a maximum of at least m, then k
keys are at least m, so none below m is among the best. What remains, some 2,800 of random scores, is taken in runs of
4,096: the best so far and the next ones. However unlike the scores, the result is the same, only later.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton_fp8 import let_later_begin, wait_for_earlier
from glm5.kernels.triton_support import dependent_launch

# Scores that a program compares at once; longer rows go through groups.
LONGEST = 8192
_MAX_K = 1 << 14
GROUPS = 4096  # of a long row, about
_RUN, _COARSEST = 4096, 64
_ABSENT = tl.constexpr(-(2**31))
_LARGEST = tl.constexpr(0x7F7FFFFF)  # rank of the largest finite number; the rank of its negative is its complement


class Groups(NamedTuple):
    """Neighbours that are looked at together: `fine`, and `coarse` of four fine ones; alike where one size will do."""

    fine: int
    coarse: int

    @classmethod
    def of(cls, num_keys: int, num_groups: int = GROUPS) -> "Groups":
        """For rows of `num_keys` scores."""
        coarse = min(_COARSEST, triton.next_power_of_2(triton.cdiv(num_keys, num_groups)))
        return cls(coarse // 4 if coarse > 8 else coarse, coarse)


@triton.jit
def _ranked(score):
    """int32 of the scores' order: NaN above all, zeros of both signs alike, -inf as `_ABSENT`, below all."""
    score = tl.where(score == 0.0, 0.0, score.to(tl.float32))
    bits = score.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = tl.where(score != score, 0x7FC00000, rank)
    return tl.where(score == float("-inf"), _ABSENT, rank)


@triton.jit
def _between(low, high, share):
    """Rank of the number at `share` of the way between those of two ranks."""
    low = tl.minimum(tl.maximum(low, ~_LARGEST), _LARGEST).to(tl.int32)
    high = tl.minimum(tl.maximum(high, ~_LARGEST), _LARGEST).to(tl.int32)
    low = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    high = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    bits = (low * (1.0 - share) + high * share).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _bracket(rank_S, k, spare):
    """(rank that k to k + spare scores reach, how many do, how many are above it if they are more than k + spare).

    The least one's rank if fewer than k scores are there.
    """
    present = rank_S > _ABSENT
    low_count, high_count = tl.sum(present.to(tl.int32), axis=0), 0
    # At least k scores have rank `low` or more, fewer than k have `high` or more.
    high = tl.max(rank_S, axis=0).to(tl.int64) + 1
    low = tl.minimum(tl.min(tl.where(present, rank_S, 0x7FFFFFFF), axis=0).to(tl.int64), high - 1)
    by_thirds = 0
    while (high - low > 1) & (low_count > k + spare):
        share = (low_count - k).to(tl.float32) / (low_count - high_count).to(tl.float32)
        third = ((high - low) * 21845) >> 16
        m1 = tl.where(by_thirds > 0, low + third, _between(low, high - 1, tl.maximum(share - 0.1, 0.0)))
        m2 = tl.where(by_thirds > 0, low + 2 * third, _between(low, high - 1, tl.minimum(share + 0.1, 1.0)))
        m1 = tl.minimum(tl.maximum(m1, low + 1), high - 1)
        m2 = tl.minimum(tl.maximum(m2, m1), high - 1)
        reach_m1, reach_m2 = rank_S >= m1.to(tl.int32), rank_S >= m2.to(tl.int32)
        counts = tl.sum(reach_m1.to(tl.int32) + (reach_m2.to(tl.int32) << 16), axis=0)
        count1, count2 = counts & 0xFFFF, (counts >> 16) & 0xFFFF
        before = low_count - high_count
        high = tl.where(count2 >= k, high, tl.where(count1 >= k, m2, m1))
        high_count = tl.where(count2 >= k, high_count, tl.where(count1 >= k, count2, count1))
        low = tl.where(count2 >= k, m2, tl.where(count1 >= k, m1, low))
        low_count = tl.where(count2 >= k, count2, tl.where(count1 >= k, count1, low_count))
        by_thirds = tl.where((by_thirds == 0) & (3 * (low_count - high_count) > before), 1, 0)
    return low.to(tl.int32), low_count, high_count


@triton.jit
def _put_best(rank_S, index_S, out_ptr, k, BLOCK_K: tl.constexpr):
    """Writes the `k` best indices in the order in which they come, then -1."""
    least, count, above = _bracket(rank_S, k, 0)
    wanted = tl.where(count > k, k - above, 0xFFFF)  # of those with the least rank
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
def _keep(value_ptr, groups_ptr, num_groups, out_ptr, num_values, least, FAN: tl.constexpr, RUN: tl.constexpr):
    """Writes the indices of those values of some groups that reach rank `least`, and says how many."""
    tl.debug_barrier()
    kept = 0
    for run in range(tl.cdiv(num_groups * FAN, RUN)):
        place = run * RUN + tl.arange(0, RUN)
        group = tl.load(groups_ptr + place // FAN, mask=place < num_groups * FAN, other=num_values)
        i = group * FAN + place % FAN
        rank = _ranked(tl.load(value_ptr + i, mask=i < num_values, other=float("-inf")))
        reaches = ((rank >= least) & (rank > _ABSENT)).to(tl.int32)
        tl.store(out_ptr + (kept + tl.cumsum(reaches, axis=0) - 1), i, mask=reaches > 0)
        kept += tl.sum(reaches, axis=0)
    tl.debug_barrier()
    return kept


@triton.jit
def _best_of_kept(score_ptr, kept_ptr, num_kept, out_ptr, k, BLOCK_K: tl.constexpr, RUN: tl.constexpr):
    """As `_put_best` of the scores with the indices at `kept_ptr`, in runs: the best so far, then the next ones."""
    p = tl.arange(0, RUN)
    for run in range(1 + tl.cdiv(tl.maximum(num_kept - RUN, 0), RUN - k)):
        is_old = (run > 0) & (p < k)
        place = run * (RUN - k) + p
        i = tl.load(kept_ptr + place, mask=(place < num_kept) & (is_old == 0), other=-1)
        i = tl.where(is_old, tl.load(out_ptr + p, mask=is_old, other=-1), i)
        rank = _ranked(tl.load(score_ptr + i, mask=i >= 0, other=float("-inf")))
        tl.debug_barrier()
        _put_best(rank, i, out_ptr, k, BLOCK_K)
        tl.debug_barrier()


@triton.jit
def _best(
    score_ptr,
    fine_ptr,
    coarse_ptr,
    end_ptr,
    scratch_ptr,
    out_ptr,
    num_keys,
    score_stride,
    fine_stride,
    coarse_stride,
    scratch_stride,
    k,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_END: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best keys of row program_id(0), of which the first end_ptr[row] scores count."""
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    score, out = score_ptr + t * score_stride, out_ptr + t * k
    end = tl.minimum(tl.load(end_ptr + t), num_keys) if HAS_END else num_keys
    i = tl.arange(0, WIDTH)
    if COARSE == 1:
        _put_best(_ranked(tl.load(score + i, mask=i < end, other=float("-inf"))), i, out, k, BLOCK_K)
    else:
        coarse, scratch = coarse_ptr + t * coarse_stride, scratch_ptr + t * scratch_stride
        rank = _ranked(tl.load(coarse + i, mask=i < tl.cdiv(end, COARSE), other=float("-inf")))
        least, count, _ = _bracket(rank, k, k // 16)
        least = tl.where(count >= k, least, _ABSENT + 1)
        reaches = ((rank >= least) & (rank > _ABSENT)).to(tl.int32)
        tl.store(scratch + (tl.cumsum(reaches, axis=0) - 1), i, mask=reaches > 0)
        num_kept = tl.sum(reaches, axis=0)
        kept = scratch + WIDTH
        if COARSE > FINE:
            fine, num_fine = fine_ptr + t * fine_stride, tl.cdiv(end, FINE)
            num_kept = _keep(fine, scratch, num_kept, kept, num_fine, least, COARSE // FINE, RUN)
            scratch, kept = kept, kept + WIDTH * (COARSE // FINE)
        num_kept = _keep(score, scratch, num_kept, kept, end, least, FINE, RUN)
        _best_of_kept(score, kept, num_kept, out, k, BLOCK_K, RUN)


@triton.jit
def _largest(value_ptr, out_ptr, num_values, value_stride, out_stride, FAN: tl.constexpr, BLOCK: tl.constexpr):
    """out[t, g] = the largest value of a group, a NaN if it has one."""
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = g[:, None] * FAN + tl.arange(0, FAN)[None, :]
    value = tl.load(value_ptr + t * value_stride + i, mask=i < num_values, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((value != value).to(tl.int32), axis=1) > 0
    largest = tl.max(tl.where(value != value, float("-inf"), value), axis=1)
    tl.store(out_ptr + t * out_stride + g, tl.where(has_nan, float("nan"), largest), mask=g < out_stride)


def top_k(score_TS: Tensor, k: int, *, longest: int = LONGEST, num_groups: int = GROUPS) -> Tensor:
    """As `reference.top_k`. Rows of more than `longest` scores go through about `num_groups` groups.

    Raises ValueError for scores wider than float32, and for a k of more than 16,384.
    """
    if score_TS.dtype == torch.float64:
        raise ValueError("top_k[triton] compares float32, got float64 scores; use impl='reference'")
    if k > _MAX_K:
        raise ValueError(f"top_k[triton] takes k up to {_MAX_K}, got {k}; use impl='reference'")
    score_TS = score_TS.detach().contiguous()
    if score_TS.shape[1] <= longest or not len(score_TS):
        return best_of(score_TS, None, None, None, Groups(1, 1), k)
    groups = Groups.of(score_TS.shape[1], num_groups)
    fine_TG = _maxima(score_TS, groups.fine)
    coarse_TG = fine_TG if groups.coarse == groups.fine else _maxima(fine_TG, groups.coarse // groups.fine)
    return best_of(score_TS, fine_TG, coarse_TG, None, groups, k)


def best_of(
    score_TS: Tensor, fine_TG: Tensor | None, coarse_TG: Tensor | None, end_T: Tensor | None, groups: Groups, k: int
) -> Tensor:
    """Best keys of rows, int32 [T, k], of which `end_T` scores count; by way of groups, if their maxima are given."""
    num_rows, num_keys = score_TS.shape
    out_TK = torch.empty(num_rows, k, dtype=torch.int32, device=score_TS.device)
    if num_rows == 0:
        return out_TK
    fine_TG = score_TS if fine_TG is None else fine_TG
    coarse_TG = score_TS if coarse_TG is None else coarse_TG
    width, block_k = triton.next_power_of_2(coarse_TG.shape[1]), triton.next_power_of_2(k)
    run = max(_RUN, 2 * block_k)
    scratch_size = 0 if groups.coarse == 1 else width * (1 + groups.coarse // groups.fine) + width * groups.coarse
    scratch = torch.empty(num_rows, scratch_size, dtype=torch.int32, device=score_TS.device)
    _best[(num_rows,)](
        score_TS,
        fine_TG,
        coarse_TG,
        out_TK if end_T is None else end_T,
        scratch,
        out_TK,
        num_keys,
        score_TS.stride(0),
        fine_TG.stride(0),
        coarse_TG.stride(0),
        scratch_size,
        k,
        FINE=groups.fine,
        COARSE=groups.coarse,
        WIDTH=width,
        RUN=run,
        BLOCK_K=block_k,
        HAS_END=end_T is not None,
        **dependent_launch(score_TS.device),
        num_warps=8 if max(width, run) <= LONGEST else 16,
    )
    return out_TK


def _maxima(value_TS: Tensor, fan: int) -> Tensor:
    num_rows, num_values = value_TS.shape
    num_groups = triton.cdiv(num_values, fan)
    out_TG = value_TS.new_empty(num_rows, num_groups, dtype=torch.float32)
    grid = (num_rows, triton.cdiv(num_groups, 256))
    _largest[grid](value_TS, out_TG, num_values, value_TS.stride(0), num_groups, FAN=fan, BLOCK=256)
    return out_TG
