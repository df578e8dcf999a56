"""prompt_attention on a GPU, in Triton: a program computes a tile of queries of one head, block of keys by block.

Head sizes need not be powers of two: a key is read in pieces that are (192 = 3 x 64). Blocks that every query of the
tile sees completely need no mask; those at the diagonal and at a request's first token do.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import dependent_launch, multiprocessors


@triton.jit
def _pieces(x, known, offset, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Valid rows at `x` of WIDTH values, in PIECES pieces of BLOCK values."""
    c, pieces = tl.arange(0, BLOCK)[None, :], ()
    for g in tl.static_range(PIECES):
        mask = known[:, None] & (g * BLOCK + c < WIDTH)
        pieces = pieces + (tl.load(x[:, None] + (offset + g * BLOCK + c), mask=mask, other=0.0),)
    return pieces


@triton.jit
def _add_blocks(
    q,
    sums,
    start,
    stop,
    t,
    first,
    k,
    num_tokens,
    scale,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`sums` (largest logit, sum of exponentials, sum of values) with blocks start..stop-1. k: pointers and strides."""
    q_GMN, q_MR = q
    top_M, sum_M, out_MV = sums
    k_ptr, k_stride, rope_ptr, rope_stride, v_ptr, v_stride = k
    v = tl.arange(0, BLOCK_V)[None, :]
    for block in range(start, stop):
        s = block * BLOCK_S + tl.arange(0, BLOCK_S)
        known, row = s < num_tokens, s.to(tl.int64)
        k_GSN = _pieces(k_ptr + row * k_stride, known, 0, N, BLOCK_N, PIECES)
        rope_1SR = _pieces(rope_ptr + row * rope_stride, known, 0, R, BLOCK_R, 1)
        v_SV = tl.load(v_ptr + (row * v_stride)[:, None] + v, mask=known[:, None] & (v < V), other=0.0)
        logits_MS = tl.dot(q_MR, tl.trans(rope_1SR[0]), input_precision="ieee")
        for g in tl.static_range(PIECES):
            logits_MS = tl.dot(q_GMN[g], tl.trans(k_GSN[g]), logits_MS, input_precision="ieee")
        logits_MS *= scale
        if MASKED:
            seen = (s[None, :] <= t[:, None]) & (s[None, :] >= first[:, None])
            logits_MS = tl.where(seen, logits_MS, -1e30)
        new_top_M = tl.maximum(top_M, tl.max(logits_MS, axis=1))
        p_MS = tl.exp2(logits_MS - new_top_M[:, None])
        if MASKED:
            p_MS = tl.where(seen, p_MS, 0.0)
        shrink_M = tl.exp2(top_M - new_top_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MS, axis=1)
        out_MV = tl.dot(p_MS.to(v_SV.dtype), v_SV, out_MV * shrink_M[:, None], input_precision="ieee")
        top_M = new_top_M
    return top_M, sum_M, out_MV


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    rope_ptr,
    v_ptr,
    first_ptr,
    out_ptr,
    lse_ptr,
    num_tokens,
    q_stride,
    k_stride,
    k_head,
    rope_stride,
    v_stride,
    v_head,
    scale,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    LN2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """program_id(0): head; (1): tile of queries, the last first, as they see most."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    h, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    t = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = t < num_tokens
    first = tl.load(first_ptr + t, mask=real, other=num_tokens)
    q = q_ptr + t.to(tl.int64) * q_stride + h * (N + R)
    q_GMN, q_1MR = _pieces(q, real, 0, N, BLOCK_N, PIECES), _pieces(q, real, N, R, BLOCK_R, 1)
    k = k_ptr + h * k_head, k_stride, rope_ptr, rope_stride, v_ptr + h * v_head, v_stride
    sums = tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    top_M, sum_M, out_MV = sums[0], sums[1], tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    # Blocks before `whole` and from `diagonal` on are not seen by every query of the tile.
    stop = tl.cdiv(tl.minimum((tile + 1) * BLOCK_M, num_tokens), BLOCK_S)
    start = tl.minimum(tl.min(first, axis=0) // BLOCK_S, stop)
    whole = tl.minimum(tl.cdiv(tl.max(first, axis=0), BLOCK_S), stop)
    diagonal = tl.maximum(tile * BLOCK_M // BLOCK_S, whole)
    for part in tl.static_range(3):
        begin, end = start, whole
        if part == 1:
            begin, end = whole, diagonal
        elif part == 2:
            begin, end = diagonal, stop
        what = (q_GMN, q_1MR[0]), (top_M, sum_M, out_MV), begin, end, t, first, k, num_tokens, scale, N, R, V
        top_M, sum_M, out_MV = _add_blocks(*what, BLOCK_S, BLOCK_N, BLOCK_R, BLOCK_V, PIECES, part != 1)

    at, v = t.to(tl.int64) * H + h, tl.arange(0, BLOCK_V)[None, :]
    divisor_M = tl.where(sum_M > 0, sum_M, 1.0)
    tl.store(lse_ptr + at, tl.where(sum_M > 0, (top_M + tl.log2(divisor_M)) * LN2, float("-inf")), mask=real)
    out_MV = (out_MV / divisor_M[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * V + v, out_MV, mask=real[:, None] & (v < V))


class Tiling(NamedTuple):
    """Queries and keys of a tile."""

    queries: int
    keys: int
    warps: int
    stages: int


WIDE, NARROW = Tiling(128, 64, warps=8, stages=2), Tiling(64, 64, warps=4, stages=2)
SMALL = Tiling(16, 16, warps=4, stages=2)  # products of float32 take registers where others take matrix units


def prompt_attention(
    q_THX: Tensor,
    k_THN: Tensor,
    rope_TR: Tensor,
    v_THV: Tensor,
    first_T: Tensor,
    *,
    scale: float,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.prompt_attention`, without a gradient. Raises ValueError for rows that are not in one piece."""
    (num_tokens, H, X), N, V = q_THX.shape, k_THN.shape[2], v_THV.shape[2]
    for name, x in (("k_THN", k_THN), ("rope_TR", rope_TR), ("v_THV", v_THV)):
        if x.stride(-1) != 1:
            raise ValueError(f"prompt_attention[triton] needs {name} with rows in one piece, got strides {x.stride()}")
    q_THX = q_THX.contiguous()
    out_THV = q_THX.new_empty(num_tokens, H, V)
    lse_TH = q_THX.new_empty(num_tokens, H, dtype=torch.float32)
    if num_tokens == 0:
        return out_THV, lse_TH
    tiling = tiling or _tiling_for(q_THX)
    piece = min(128, N & -N)  # the largest power of two that divides N
    block_n = piece if piece >= 16 else max(16, triton.next_power_of_2(N))
    _attend[(H, triton.cdiv(num_tokens, tiling.queries))](
        q_THX,
        k_THN,
        rope_TR,
        v_THV,
        first_T,
        out_THV,
        lse_TH,
        num_tokens,
        H * X,
        k_THN.stride(0),
        k_THN.stride(1),
        rope_TR.stride(0),
        v_THV.stride(0),
        v_THV.stride(1),
        scale * math.log2(math.e),
        H=H,
        N=N,
        R=X - N,
        V=V,
        LN2=math.log(2),
        BLOCK_M=tiling.queries,
        BLOCK_S=tiling.keys,
        BLOCK_N=block_n,
        BLOCK_R=max(16, triton.next_power_of_2(X - N)),
        BLOCK_V=max(16, triton.next_power_of_2(V)),
        PIECES=triton.cdiv(N, block_n),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **dependent_launch(q_THX.device),
    )
    return out_THV, lse_TH


def _tiling_for(q_THX: Tensor) -> Tiling:
    if q_THX.element_size() != 2:
        return SMALL
    num_tokens, num_heads, _ = q_THX.shape
    fill = num_heads * triton.cdiv(num_tokens, WIDE.queries) > multiprocessors(q_THX.device)
    return WIDE if fill else NARROW  # whose longest program is half as long: 71 us where wide ones take 79
