"""sparse_mla on a GPU, in Triton: split over keys, merged in a fixed order.

A program has a share of the keys of one query, or, where every visible key is read, of a few queries in a row. Keys are
the rows of both products, as the tensor cores want at least 64 rows and a rank may hold 8 heads:

    logits[n, r] = latent[n] . q[r]        out[c, r] = sum_n latent[n, c] p[n, r]        r: (query, head), 16 or more

A latent goes from the pool to shared memory once and is an operand of both there, 128 values at a time: more would take
more registers than there are. FP8 latents are widened to q's dtype in registers, 128 values having one scale. The sum
over a share is taken in float32, in base 2; a second kernel adds the shares up in order. How many there are follows
from shapes alone, so results are the same in every run.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.block_scaled import BLOCK, FP8
from glm5.kernels.fp8_pool import ROPE_DTYPE, Fp8Keys, Fp8Latents, Pool

_BLOCK_N = 64  # keys at a time: rows of the smallest product of a warp group
_ROWS, _ROWS_SHARED = 16, 32  # (query, head) pairs of a program: of one query; of queries that read the same keys


@triton.jit
def _queries(
    q,
    real,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Columns of (query, head) pairs at `q`: for the values, in GROUPS pieces, and for the rotated part."""
    c, r, q_GCH = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, BLOCK_R)[None, :], ()
    for g in tl.static_range(GROUPS):
        q_HC = tl.load(q + (g * BLOCK_C + c), mask=real[:, None] & (g * BLOCK_C + c < C), other=0.0)
        q_GCH = q_GCH + (tl.trans(q_HC),)
    return q_GCH, tl.trans(tl.load(q + (C + r), mask=real[:, None] & (r < R), other=0.0))


@triton.jit
def _logits(
    q_GCH,
    q_RH,
    latent_ptr,
    scale_ptr,
    rope_ptr,
    page,
    slot,
    known,
    page_stride,
    row_stride,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """q . latent of keys, and the latents' values, in GROUPS pieces. Unknown keys are zeros: NaN may lie there."""
    latent = latent_ptr + (page * page_stride + slot * row_stride)[:, None]
    rope = rope_ptr + (page * page_stride + slot * row_stride)[:, None]
    if IS_FP8:  # strides are in bytes
        rope = rope_ptr + (page * (page_stride // 2) + slot * (row_stride // 2))[:, None]
        scale = scale_ptr + (page * (page_stride // 4) + slot * (row_stride // 4))
    c, r, values_GNC = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, BLOCK_R)[None, :], ()
    rope_NR = tl.load(rope + r, mask=known[:, None] & (r < R), other=0.0).to(q_RH.dtype)
    logits_NH = tl.dot(rope_NR, q_RH, input_precision="ieee")
    for g in tl.static_range(GROUPS):
        value_NC = tl.load(latent + (g * BLOCK_C + c), mask=known[:, None] & (g * BLOCK_C + c < C), other=0.0)
        if IS_FP8:
            scale_N = tl.load(scale + g, mask=known, other=0.0)
            value_NC = (value_NC.to(tl.float32) * scale_N[:, None]).to(q_RH.dtype)
        logits_NH = tl.dot(value_NC, q_GCH[g], logits_NH, input_precision="ieee")
        values_GNC = values_GNC + (value_NC,)
    return logits_NH, values_GNC


@triton.jit
def _add(values_GNC, logits_NH, seen_NH, top_H, sum_H, out_GCH, GROUPS: tl.constexpr):
    """(largest logit, sum of exponentials, sums of values) with those of a block of keys."""
    logits_NH = tl.where(seen_NH, logits_NH, -1e30)
    new_top_H = tl.maximum(top_H, tl.max(logits_NH, axis=0))
    p_NH = tl.where(seen_NH, tl.exp2(logits_NH - new_top_H[None, :]), 0.0)
    shrink_H = tl.exp2(top_H - new_top_H)
    sum_H = sum_H * shrink_H + tl.sum(p_NH, axis=0)
    p_NH, new_GCH = p_NH.to(values_GNC[0].dtype), ()
    for g in tl.static_range(GROUPS):
        old_CH = out_GCH[g] * shrink_H[None, :]
        new_GCH = new_GCH + (tl.dot(tl.trans(values_GNC[g]), p_NH, old_CH, input_precision="ieee"),)
    return new_top_H, sum_H, new_GCH


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
    IS_FP8: tl.constexpr,
):
    """out[t, share, h] and lse[t, share, h] (times its unit, from base 2). Strides are in the pool's elements.

    program_id(0): share of the keys; (1): tile of queries, the last first; (2): block of heads.
    """
    share, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    pair, n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    place, h = (pair // H) * (QUERIES > 1), tl.program_id(2) * BLOCK_H + (pair % H if QUERIES > 1 else pair)
    t = (tile * QUERIES + place).to(tl.int64)
    real = (t < num_queries) & (place < QUERIES) & (h < H)
    row, end = tl.load(row_ptr + t, mask=real, other=-1), tl.load(end_ptr + t, mask=real, other=0)
    q_GCH, q_RH = _queries(q_ptr + (t * H + h)[:, None] * (C + R), real, C, R, BLOCK_C, BLOCK_R, GROUPS)
    top_H, sum_H, out_GCH = tl.full([BLOCK_H], -1e30, tl.float32), tl.zeros([BLOCK_H], tl.float32), ()
    for _ in tl.static_range(GROUPS):
        out_GCH = out_GCH + (tl.zeros([BLOCK_C, BLOCK_H], tl.float32),)

    for first in range(QUERIES):
        # The request of the tile's query `first`; nothing is left to do if an earlier query has the same.
        its_row = tl.max(tl.where(place == first, row, -1), axis=0)
        is_new = tl.min(tl.where(row == its_row, place, QUERIES), axis=0) == first
        last_end = tl.max(tl.where((row == its_row) & is_new, end, 0), axis=0)
        pages = table_ptr + its_row.to(tl.int64) * num_columns
        blocks = tl.where(last_end > 0, tl.cdiv(num_keys if SELECTED else last_end, BLOCK_N), 0)
        a_share = tl.cdiv(blocks, num_shares)
        for block in range(share * a_share, tl.minimum((share + 1) * a_share, blocks)):
            key = block * BLOCK_N + n
            if SELECTED:
                key = tl.load(keys_ptr + tile.to(tl.int64) * num_keys + key, mask=key < num_keys, other=-1)
            known = (key >= 0) & (key < last_end)
            page = tl.load(pages + key // Z, mask=known, other=0).to(tl.int64)
            pool = latent_ptr, scale_ptr, rope_ptr, page, key % Z, known, page_stride, row_stride
            logits_NH, values_GNC = _logits(q_GCH, q_RH, *pool, C, R, BLOCK_C, BLOCK_R, GROUPS, IS_FP8)
            seen_NH = known[:, None] & ((row == its_row)[None, :] & (key[:, None] < end[None, :]))
            top_H, sum_H, out_GCH = _add(values_GNC, logits_NH * qk_scale, seen_NH, top_H, sum_H, out_GCH, GROUPS)

    place_of = (t * num_shares + share) * H + h
    divisor_H = tl.where(sum_H > 0, sum_H, 1.0)
    lse_H = tl.where(sum_H > 0, (top_H + tl.log2(divisor_H)) * lse_unit, float("-inf"))
    tl.store(lse_ptr + place_of, lse_H, mask=real)
    for g in tl.static_range(GROUPS):
        c = g * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        out_HC = tl.trans(out_GCH[g] / divisor_H[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place_of[:, None] * C + c, out_HC, mask=real[:, None] & (c < C))


@triton.jit
def _merge(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    H: tl.constexpr,
    C: tl.constexpr,
    SHARES: tl.constexpr,
    LN2: tl.constexpr,
    BLOCK_SHARES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[t, h] and lse[t, h] from their shares: program_id(0) is t * H + h."""
    t, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    s, c = tl.arange(0, BLOCK_SHARES), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    place_S = (t * SHARES + s) * H + h
    lse_S = tl.load(part_lse_ptr + place_S, mask=s < SHARES, other=float("-inf"))
    top = tl.maximum(tl.max(lse_S, axis=0), -1e30)
    weight_S = tl.exp2(lse_S - top)
    total = tl.sum(weight_S, axis=0)
    divisor = tl.where(total > 0, total, 1.0)
    part_SC = tl.load(
        part_ptr + place_S[:, None] * C + c[None, :], mask=(s[:, None] < SHARES) & (c[None, :] < C), other=0.0
    )
    out_C = tl.sum(part_SC * weight_S[:, None], axis=0) / divisor
    tl.store(out_ptr + (t * H + h) * C + c, out_C.to(out_ptr.dtype.element_ty), mask=c < C)
    if tl.program_id(1) == 0:
        lse = tl.where(total > 0, (top + tl.log2(divisor)) * LN2, float("-inf"))
        tl.store(lse_ptr + t * H + h, lse)


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
) -> tuple[Tensor, Tensor]:
    """As `reference.sparse_mla`, without a gradient.

    `num_shares`: pieces that a query's keys are cut into (None: as many as fill the GPU); with a given number, its
    result does not depend on how many other queries there are. Raises ValueError for pools that it cannot read.
    """
    (num_queries, H, L), page_size = q_THL.shape, latent_PZL.shape[1]
    values, scales, rope = _parts(latent_PZL, value_dim)
    num_keys = page_table_BN.shape[1] * page_size if keys_TK is None else keys_TK.shape[1]
    # Queries in a row are taken to share their keys where there are more of them than requests.
    crowded = keys_TK is None and num_queries >= 2 * page_table_BN.shape[0]
    queries = max(1, _ROWS_SHARED // H) if crowded else 1
    block_h = _ROWS if queries == 1 else _ROWS_SHARED
    block_n = _BLOCK_N if q_THL.element_size() == 2 else 16
    tiles, head_blocks = triton.cdiv(num_queries, queries), triton.cdiv(H, block_h)
    if num_shares is None:
        num_shares = _num_shares(tiles * head_blocks, triton.cdiv(num_keys, block_n), q_THL.device)

    out_THC = q_THL.new_empty(num_queries, H, value_dim)
    lse_TH = q_THL.new_empty(num_queries, H, dtype=torch.float32)
    part, part_lse = out_THC, lse_TH
    if num_shares > 1:
        part = q_THL.new_empty(num_queries, num_shares, H, value_dim, dtype=torch.float32)
        part_lse = q_THL.new_empty(num_queries, num_shares, H, dtype=torch.float32)
    if num_queries == 0:
        return out_THC, lse_TH
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
        num_queries,
        page_table_BN.shape[1],
        num_keys,
        values.stride(0),
        values.stride(1),
        num_shares,
        scale * math.log2(math.e),
        math.log(2) if num_shares == 1 else 1.0,
        **_sizes(H, value_dim, L - value_dim),
        Z=page_size,
        QUERIES=queries,
        BLOCK_N=block_n,
        BLOCK_H=block_h,
        SELECTED=keys_TK is not None,
        IS_FP8=isinstance(latent_PZL, Fp8Latents),
        num_warps=4,
        num_stages=3,
    )
    if num_shares > 1:
        grid = (num_queries * H, triton.cdiv(value_dim, BLOCK))
        _merge[grid](part, part_lse, out_THC, lse_TH, H=H, C=value_dim, SHARES=num_shares, **_merged(num_shares))
    return out_THC, lse_TH


def _sizes(num_heads: int, value_dim: int, rope_dim: int) -> dict[str, int]:
    """Sizes and blocks of a latent, the least of which a product takes is 16."""
    return {
        "H": num_heads,
        "C": value_dim,
        "R": rope_dim,
        "BLOCK_C": max(16, triton.next_power_of_2(min(BLOCK, value_dim))),
        "BLOCK_R": max(16, triton.next_power_of_2(rope_dim)),
        "GROUPS": triton.cdiv(value_dim, BLOCK),
    }


def _merged(num_shares: int) -> dict[str, Any]:
    return {
        "LN2": math.log(2),
        "BLOCK_SHARES": triton.next_power_of_2(num_shares),
        "BLOCK_C": BLOCK,
        "num_warps": 4,
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


def _num_shares(num_programs: int, num_blocks: int, device: torch.device) -> int:
    """As many as give every multiprocessor one program."""
    return max(1, min(_multiprocessors(device) // max(1, num_programs), num_blocks))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
