"""top_k on a GPU, in Triton: one program a row, which finds the k-th best score by counting.

Scores are compared as integers of the same order (ranks). With a row in registers, a step counts the scores of at least
m1 and of at least m2, and continues with the range that contains the k-th. m1 and m2 are near its position under
uniform scores or, if that makes no progress, at the thirds of the range. Random scores take six to eight steps. A
prefix sum over the row then gives every chosen key its position, in index order.

For long rows, the maxima of about 4,096 groups of neighbours are computed first. If k groups have a maximum of at least
m, k keys are at least m, so no key below m is among the best. Many programs collect the scores of at least m, each in
its chunk of the row. The remaining ones, about 3,300 for random scores, are merged in runs of 4,096 with the best so
far. The result is exact for any scores; only the time depends on them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import dependent_launch

# Scores that a program compares at once; longer rows go through groups.
LONGEST = 8192
_MAX_K = 1 << 14
GROUPS = 4096  # of a long row, about
_RUN, _LARGEST_GROUP = 4096, 64
_CHUNK = 2048  # scores filtered by a program
_ABSENT = tl.constexpr(-(2**31))
_LARGEST = tl.constexpr(0x7F7FFFFF)  # rank of the largest finite number; the rank of its negative is its complement


def group_size(num_keys: int, num_groups: int = GROUPS) -> int:
    """Size of a group in rows of `num_keys` scores, a power of two."""
    return min(_LARGEST_GROUP, triton.next_power_of_2(triton.cdiv(num_keys, num_groups)))


@triton.jit
def _ranked(score):
    """int32 of the scores' order: NaN above all, zeros of both signs alike, -inf as `_ABSENT`, below all."""
    score = tl.where(score == 0.0, 0.0, score.to(tl.float32))
    bits = score.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = tl.where(score != score, 0x7FC00000, rank)
    return tl.where(score == float("-inf"), _ABSENT, rank)


@triton.jit
def _rank_between(low, high, share):
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
        m1 = tl.where(by_thirds > 0, low + third, _rank_between(low, high - 1, tl.maximum(share - 0.1, 0.0)))
        m2 = tl.where(by_thirds > 0, low + 2 * third, _rank_between(low, high - 1, tl.minimum(share + 0.1, 1.0)))
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
def _best_of_row(
    score_ptr,
    end_ptr,
    out_ptr,
    num_keys,
    score_stride,
    k,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_END: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best keys of row program_id(0), of which the first end_ptr[row] scores count."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    t = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(end_ptr + t), num_keys) if HAS_END else num_keys
    i = tl.arange(0, WIDTH)
    rank = _ranked(tl.load(score_ptr + t * score_stride + i, mask=i < end, other=float("-inf")))
    _put_best(rank, i, out_ptr + t * k, k, BLOCK_K)


@triton.jit
def _threshold(
    group_ptr,
    end_ptr,
    least_ptr,
    num_keys,
    group_stride,
    k,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_END: tl.constexpr,
    PDL: tl.constexpr,
):
    """least[t]: a rank that at least k groups reach, and few more; below all ranks if there are fewer groups."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    t = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(end_ptr + t), num_keys) if HAS_END else num_keys
    i = tl.arange(0, WIDTH)
    rank = _ranked(tl.load(group_ptr + t * group_stride + i, mask=i < tl.cdiv(end, GROUP), other=float("-inf")))
    least, count, _ = _bracket(rank, k, k // 8)
    tl.store(least_ptr + t, tl.where(count >= k, least, _ABSENT + 1))


@triton.jit
def _compact(
    score_ptr,
    end_ptr,
    least_ptr,
    kept_ptr,
    count_ptr,
    num_keys,
    score_stride,
    CHUNK: tl.constexpr,
    HAS_END: tl.constexpr,
    PDL: tl.constexpr,
):
    """kept[t, n, :count[t, n]]: which scores of chunk n = program_id(1) reach least[t], in order."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    t, n, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    end = tl.minimum(tl.load(end_ptr + t), num_keys) if HAS_END else num_keys
    i = n * CHUNK + tl.arange(0, CHUNK)
    rank = _ranked(tl.load(score_ptr + t * score_stride + i, mask=i < end, other=float("-inf")))
    reaches = ((rank >= tl.load(least_ptr + t)) & (rank > _ABSENT)).to(tl.int32)
    place = (t * num_chunks + n) * CHUNK + tl.cumsum(reaches, axis=0) - 1
    tl.store(kept_ptr + place, i, mask=reaches > 0)
    tl.store(count_ptr + t * num_chunks + n, tl.sum(reaches, axis=0))


@triton.jit
def _best_of_kept(
    score_ptr,
    kept_ptr,
    count_ptr,
    out_ptr,
    num_chunks,
    score_stride,
    k,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `_best_of_row`, of what is kept, in runs: the best so far, then the next ones. CHUNKS is 2 ** STEPS."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    t, n, p = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS), tl.arange(0, RUN)
    score, out, kept = score_ptr + t * score_stride, out_ptr + t * k, kept_ptr + t * num_chunks * CHUNK
    count = tl.load(count_ptr + t * num_chunks + n, mask=n < num_chunks, other=0)
    first = tl.cumsum(count, axis=0) - count
    num_kept = tl.sum(count, axis=0)
    for run in range(1 + tl.cdiv(tl.maximum(num_kept - RUN, 0), RUN - k)):
        is_old = (run > 0) & (p < k)
        place = run * (RUN - k) + p
        of_chunk = tl.zeros([RUN], tl.int32)  # the last that begins at `place` or before it
        for step in tl.static_range(STEPS):
            later = of_chunk + (CHUNKS >> (step + 1))
            of_chunk = tl.where(tl.gather(first, later, 0) <= place, later, of_chunk)
        at = kept + of_chunk * CHUNK + (place - tl.gather(first, of_chunk, 0))
        i = tl.load(at, mask=(place < num_kept) & (is_old == 0), other=-1)
        i = tl.where(is_old, tl.load(out + p, mask=is_old, other=-1), i)
        rank = _ranked(tl.load(score + i, mask=i >= 0, other=float("-inf")))
        tl.debug_barrier()
        _put_best(rank, i, out, k, BLOCK_K)
        tl.debug_barrier()


@triton.jit
def _largest(
    value_ptr,
    out_ptr,
    num_values,
    value_stride,
    out_stride,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, g] = the largest value of a group, a NaN if it has one."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
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
    num_rows, num_keys = score_TS.shape
    if num_keys <= longest or not num_rows:
        return best_of(score_TS, None, None, 1, k)
    group = group_size(num_keys, num_groups)
    group_TG = score_TS.new_empty(num_rows, triton.cdiv(num_keys, group), dtype=torch.float32)
    block = max(1, _CHUNK // group)
    grid = (num_rows, triton.cdiv(group_TG.shape[1], block))
    _largest[grid](
        score_TS, group_TG, num_keys, score_TS.stride(0), group_TG.stride(0), GROUP=group, BLOCK=block,
        **dependent_launch(score_TS.device),
    )  # fmt: skip
    return best_of(score_TS, group_TG, None, group, k)


def best_of(score_TS: Tensor, group_TG: Tensor | None, end_T: Tensor | None, group: int, k: int) -> Tensor:
    """Best keys of rows, int32 [T, k], of which `end_T` scores count; by way of maxima of groups, if they are given."""
    num_rows, num_keys = score_TS.shape
    device, launch = score_TS.device, dependent_launch(score_TS.device)
    out_TK = torch.empty(num_rows, k, dtype=torch.int32, device=device)
    if num_rows == 0:
        return out_TK
    has_end, end_T = end_T is not None, out_TK if end_T is None else end_T
    block_k = triton.next_power_of_2(k)
    if group_TG is None:
        width = triton.next_power_of_2(num_keys)
        warps = 8 if max(width, block_k) <= LONGEST else 16
        sizes = {"WIDTH": width, "BLOCK_K": block_k, "HAS_END": has_end, "num_warps": warps}
        _best_of_row[(num_rows,)](score_TS, end_T, out_TK, num_keys, score_TS.stride(0), k, **sizes, **launch)
        return out_TK
    width, chunks, run = group_TG.shape[1], triton.cdiv(num_keys, _CHUNK), max(_RUN, 2 * block_k)
    least_T = torch.empty(num_rows, dtype=torch.int32, device=device)
    count_TN = torch.empty(num_rows, chunks, dtype=torch.int32, device=device)
    kept_TNS = torch.empty(num_rows, chunks, _CHUNK, dtype=torch.int32, device=device)
    sizes = {"WIDTH": triton.next_power_of_2(width), "HAS_END": has_end, "num_warps": 8 if width <= LONGEST else 16}
    where = num_keys, group_TG.stride(0), k
    _threshold[(num_rows,)](group_TG, end_T, least_T, *where, GROUP=group, **sizes, **launch)
    _compact[(num_rows, chunks)](
        score_TS, end_T, least_T, kept_TNS, count_TN, num_keys, score_TS.stride(0), CHUNK=_CHUNK, HAS_END=has_end,
        **launch,
    )  # fmt: skip
    steps = (chunks - 1).bit_length()
    sizes = {"CHUNK": _CHUNK, "CHUNKS": 1 << steps, "STEPS": steps, "RUN": run, "BLOCK_K": block_k}
    _best_of_kept[(num_rows,)](
        score_TS, kept_TNS, count_TN, out_TK, chunks, score_TS.stride(0), k, **sizes,
        num_warps=8 if run <= LONGEST else 16, **launch,
    )  # fmt: skip
    return out_TK
