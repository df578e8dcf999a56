"""index_score on a GPU, in Triton: keys are the rows of the product, heads of one or of several queries its columns.

    hits[s, (t, j)] = key[s] . q[t, j]        score[t, s] = (sum_j w[t, j] relu(hits[s, (t, j)])) scale

A program computes every n-th block of keys that its queries see; blocks that no query sees are skipped. FP8 keys are
cast to q's dtype, which is exact, and their positive scales multiply the sum.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, Pool
from glm5.kernels.triton_fp8 import materialize, pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import dependent_launch

_QUERIES = 8  # of a prompt, that read the same keys


@triton.jit
def _places(page, slot, page_stride, row_stride, scale_page_stride, scale_row_stride):
    """Where keys and their scales are."""
    return page * page_stride + slot * row_stride, page * scale_page_stride + slot * scale_row_stride


@triton.jit
def _store_groups(score_ST, same_T, group, t_T, group_stride, block, GROUP: tl.constexpr):
    """Store the maxima of every GROUP scores of a block."""
    BLOCK_S: tl.constexpr = score_ST.shape[0]
    largest_UT = tl.max(tl.reshape(score_ST, [BLOCK_S // GROUP, GROUP, score_ST.shape[1]]), axis=1)
    g = block * (BLOCK_S // GROUP) + tl.arange(0, BLOCK_S // GROUP)
    at = group + t_T[None, :] * group_stride + g[:, None]
    tl.store(at, largest_UT, mask=same_T[None, :] & (g[:, None] < group_stride))


@triton.jit
def _rotated(q, cos_ptr, sin_ptr, t, QUERIES: tl.constexpr, HALF: tl.constexpr):
    """Rows q of queries t, the first 2 HALF dimensions rotated, rounded to q's dtype where `rope` rounds."""
    p = tl.arange(0, q.shape[1] // 2)
    at = (tl.min(t, axis=0) * HALF + p)[None, :] if QUERIES == 1 else (t * HALF)[:, None] + p[None, :]
    cos = tl.load(cos_ptr + at, mask=(p < HALF)[None, :], other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=(p < HALF)[None, :], other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(q.to(tl.float32), [q.shape[0], q.shape[1] // 2, 2]))
    # `materialize`: a product that is added in the same instruction would skip its rounding.
    first = materialize((a * cos).to(q.dtype)).to(tl.float32) - materialize((b * sin).to(q.dtype)).to(tl.float32)
    second = materialize((b * cos).to(q.dtype)).to(tl.float32) + materialize((a * sin).to(q.dtype)).to(tl.float32)
    return tl.reshape(tl.join(first, second), q.shape).to(q.dtype)


@triton.jit
def _queries(
    q_ptr, cos_ptr, sin_ptr, t, j, i, real, q_stride, last, I: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr
):
    """Heads j of queries t as columns, the first 2 HALF dimensions rotated; zeros where not `real`."""
    at = q_ptr + (t * q_stride + j * I)[:, None] + i[None, :]
    q = tl.load(at, mask=real[:, None] & (i[None, :] < I), other=0.0)
    if HALF:
        q = _rotated(q, cos_ptr, sin_ptr, tl.minimum(t, last), QUERIES, HALF)
    return tl.trans(q)


# Specializing on multiples of 16 would not help the compiler, and would compile more kernels.
@triton.jit(do_not_specialize=["num_queries", "num_columns"])
def _score(
    q_ptr,
    cos_ptr,
    sin_ptr,
    key_ptr,
    key_scale_ptr,
    w_ptr,
    table_ptr,
    row_ptr,
    end_ptr,
    score_ptr,
    group_ptr,
    q_stride,
    num_queries,
    num_columns,
    page_stride,
    row_stride,
    scale_page_stride,
    scale_row_stride,
    score_stride,
    group_stride,
    scale,
    J: tl.constexpr,
    I: tl.constexpr,
    Z: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    IS_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """score[t, s] of the blocks that a query sees, -inf past its end; and the maxima of every GROUP scores, if above
    1."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    tile, share, num_shares = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    query = tl.arange(0, QUERIES)
    t_T = (tile * QUERIES + query).to(tl.int64)
    row_T = tl.load(row_ptr + t_T, mask=t_T < num_queries, other=-1)
    end_T = tl.load(end_ptr + t_T, mask=t_T < num_queries, other=0)
    pair = tl.arange(0, QUERIES * BLOCK_J)
    t, j, i = (tile * QUERIES + pair // BLOCK_J).to(tl.int64), pair % BLOCK_J, tl.arange(0, BLOCK_I)
    real = (t < num_queries) & (j < J)
    w = tl.load(w_ptr + t * J + j, mask=real, other=0.0).to(tl.float32)
    q_I = _queries(q_ptr, cos_ptr, sin_ptr, t, j, i, real, q_stride, num_queries - 1, I, QUERIES, HALF)

    for first in range(QUERIES):
        # The request of the tile's query `first`. Nothing is left to do if an earlier query is of the same request.
        request = tl.max(tl.where(query == first, row_T, -1), axis=0)
        same_T = (row_T == request) & (t_T < num_queries)
        is_new = tl.min(tl.where(row_T == request, query, QUERIES), axis=0) == first
        last_end = tl.where(is_new, tl.max(tl.where(same_T, end_T, 0), axis=0), 0)
        pages = table_ptr + request.to(tl.int64) * num_columns
        stop = tl.cdiv(last_end, BLOCK_S)
        next_page = tl.load(pages + share * BLOCK_S // Z, mask=share < stop, other=0).to(tl.int64)
        for block in range(share, stop, num_shares):
            s = block * BLOCK_S + tl.arange(0, BLOCK_S)
            if Z % BLOCK_S == 0:  # one page, whose number is read a block ahead
                page, following = next_page, block + num_shares
                next_page = tl.load(pages + following * BLOCK_S // Z, mask=following < stop, other=0).to(tl.int64)
                rows, scales = _places(page, s % Z, page_stride, row_stride, scale_page_stride, scale_row_stride)
            else:
                page_S = tl.load(pages + s // Z, mask=s < last_end, other=0).to(tl.int64)
                rows, scales = _places(page_S, s % Z, page_stride, row_stride, scale_page_stride, scale_row_stride)
            key = key_ptr + rows[:, None] + i[None, :]
            key_SI = tl.load(key, mask=(s[:, None] < last_end) & (i[None, :] < I), other=0.0)
            hits = tl.dot(key_SI.to(q_I.dtype), q_I, input_precision="ieee")
            hits = tl.maximum(hits, 0.0) * w[None, :]
            score_ST = tl.sum(tl.reshape(hits, [BLOCK_S, QUERIES, BLOCK_J]), axis=2) * scale
            if IS_FP8:
                score_ST *= tl.load(key_scale_ptr + scales, mask=s < last_end, other=0.0)[:, None]
            score_ST = tl.where(s[:, None] < end_T[None, :], score_ST, float("-inf"))
            at = score_ptr + t_T[None, :] * score_stride
            tl.store(at + s[:, None], score_ST, mask=same_T[None, :] & (s[:, None] < num_columns * Z))
            if GROUP > 1:
                _store_groups(score_ST, same_T, group_ptr, t_T, group_stride, block, GROUP)


class Tiling(NamedTuple):
    """Keys and queries of a tile, and the number of programs for a few queries."""

    keys: int
    queries: int
    warps: int
    stages: int
    programs: int


def tiling_for(*, many_queries: bool, is_float32: bool) -> Tiling:
    """Without an entry in `kernels/tuned`: what was fastest on an H200 (docs/performance-kernels.md). 64 keys make the
    smallest product of a warp group; of 528 programs, two at a time, every multiprocessor has four.
    """
    if is_float32:  # products of float32 take registers where others take matrix units
        return Tiling(64, _QUERIES if many_queries else 1, warps=4, stages=3, programs=1056)
    return Tiling(64, _QUERIES, 4, 2, programs=528) if many_queries else Tiling(64, 1, 4, 2, programs=2112)


def tiling_of(q_TJI: Tensor, key_PZI: Pool, page_table_BN: Tensor, num_shares: int = 1) -> Tiling:
    """The tiling for these queries and those of the other shares. They are crowded if requests have many queries."""
    num_queries, J, I = num_shares * q_TJI.shape[0], *q_TJI.shape[1:]
    many_queries = num_queries >= _QUERIES * page_table_BN.shape[0]
    tiling = None
    if q_TJI.element_size() == 2:
        sizes = f"J={J} I={I}{' fp8' if isinstance(key_PZI, Fp8Keys) else ''}{' many_queries' if many_queries else ''}"
        tiling = tuned.find(Tiling, "index_score", sizes, num_queries, q_TJI.device)
    return tiling or tiling_for(many_queries=many_queries, is_float32=q_TJI.element_size() > 2)


def index_score(
    q_TJI: Tensor, key_PZI: Pool, w_TJ: Tensor, page_table_BN: Tensor, row_T: Tensor, end_T: Tensor, *, scale: float
) -> Tensor:
    """As `reference.index_score`, without a gradient. Raises ValueError for pools that it cannot read."""
    num_keys = page_table_BN.shape[1] * key_PZI.shape[1]
    score_TS = q_TJI.new_full((q_TJI.shape[0], num_keys), float("-inf"), dtype=torch.float32)
    score_visible(q_TJI, key_PZI, w_TJ, page_table_BN, row_T, end_T, score_TS, scale=scale)
    return score_TS


def score_visible(
    q_TJI: Tensor,
    key_PZI: Pool,
    w_TJ: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    score_TS: Tensor,
    group_TG: Tensor | None = None,
    *,
    scale: float,
    group: int = 1,
    rotation: tuple[Tensor, Tensor] | None = None,
    tiling: Tiling | None = None,
) -> None:
    """Write the scores of visible keys into `score_TS`, and the maximum of every `group` of them into `group_TG`.

    `rotation`: (cos, sin) as in `rope`, applied to the first dimensions of queries. Blocks without a visible key are
    not written. Raises ValueError for pools that it cannot read.
    """
    num_queries, J, I = q_TJI.shape
    if isinstance(key_PZI, Fp8Latents):
        raise ValueError("index_score[triton] reads index keys, got a pool of latents")
    data, key_scale = (key_PZI.data, key_PZI.scale) if isinstance(key_PZI, Fp8Keys) else (key_PZI, None)
    if data.stride(2) != 1:
        raise ValueError(f"index_score[triton] needs rows in one piece, got a pool with strides {data.stride()}")
    if num_queries == 0:
        return
    q_TJI = q_TJI if q_TJI.stride()[1:] == (I, 1) else q_TJI.contiguous()
    cut = tiling or tiling_of(q_TJI, key_PZI, page_table_BN)
    block_j = max(16 // cut.queries, triton.next_power_of_2(J))
    tiles = triton.cdiv(num_queries, cut.queries)
    shares = max(1, min(triton.cdiv(score_TS.shape[1], cut.keys), cut.programs // tiles))
    group_TG = score_TS if group_TG is None else group_TG
    cos, sin = (q_TJI, q_TJI) if rotation is None else (each.contiguous() for each in rotation)
    _score[(shares, tiles)](
        q_TJI,
        cos,
        sin,
        data,
        data if key_scale is None else key_scale,
        w_TJ.contiguous(),
        page_table_BN.contiguous(),
        row_T,
        end_T,
        score_TS,
        group_TG,
        q_TJI.stride(0),
        num_queries,
        page_table_BN.shape[1],
        data.stride(0),
        data.stride(1),
        0 if key_scale is None else key_scale.stride(0),
        0 if key_scale is None else key_scale.stride(1),
        score_TS.stride(0),
        group_TG.stride(0),
        scale,
        J=J,
        I=I,
        Z=key_PZI.shape[1],
        QUERIES=cut.queries,
        BLOCK_J=block_j,
        BLOCK_I=max(16, triton.next_power_of_2(I)),
        BLOCK_S=cut.keys,
        GROUP=group,
        HALF=0 if rotation is None else cos.shape[1],
        IS_FP8=key_scale is not None,
        **dependent_launch(q_TJI.device),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
