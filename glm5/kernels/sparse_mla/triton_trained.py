"""sparse_mla with its gradient on a GPU, in Triton: keys are gathered block by block, forward and backward.

    s = q . latent scale      p = exp(s - lse)      dp = dout . latent[:C]      ds = p (dp - delta) scale
    delta = dout . out - dlse    dq = sum_k ds latent[k]    dlatent[k] += ds q + p dout (of C values)

A program has all heads of one query. Backward goes over the keys twice: once for the gradients of keys, which needs ds,
and once with ds from memory for the gradient of the query, as both at once would not fit in registers. Saved for
backward are the inputs and lse; ds exists for _DS values at a time.

Gradients of a key are summed over queries by float32 atomics, in any order. With torch's deterministic algorithms they
are stored per query and summed in the order of queries (`add_rows`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.kernels.add_rows.triton import add_rows
from glm5.kernels.paging import slots_or_none
from glm5.kernels.triton_gather import give, products, rows, store

MAX_HEADS = 64
_DS = 1 << 28  # values of ds, 512 MB in 16 bits; of rows written down, 1 GB in float32
_SLOTS = 1 << 24
LOG2E = tl.constexpr(1.4426950408889634)


class Tiling(NamedTuple):
    """Keys at a time, values of a latent in a product, warps and stages."""

    keys: int
    values: int
    warps: int
    stages: int


@triton.jit
def _forward(
    q_ptr, latent_ptr, slot_ptr, count_ptr, out_ptr, lse_ptr, scale, K, H, C, R,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h, n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    L = C + R
    real_H, row_H = h < H, (t * H + h) * L
    q_GHC = rows(q_ptr, row_H, real_H, C, BLOCK_C, GROUPS)
    q_HR = rows(q_ptr + C, row_H, real_H, R, BLOCK_R, 1)
    top_H, sum_H, out_GHC = tl.full([BLOCK_H], -1e30, tl.float32), tl.zeros([BLOCK_H], tl.float32), ()
    for _ in tl.static_range(GROUPS):
        out_GHC = out_GHC + (tl.zeros([BLOCK_H, BLOCK_C], tl.float32),)
    for first in range(0, tl.load(count_ptr + t), BLOCK_N):
        slot_N = tl.load(slot_ptr + t * K + first + n, mask=first + n < K, other=-1).to(tl.int64)
        known_N, row_N = slot_N >= 0, slot_N * L
        value_GNC = rows(latent_ptr, row_N, known_N, C, BLOCK_C, GROUPS)
        rope_NR = rows(latent_ptr + C, row_N, known_N, R, BLOCK_R, 1)
        logits_HN = products(q_GHC, value_GNC, tl.zeros([BLOCK_H, BLOCK_N], tl.float32), GROUPS)
        logits_HN = products(q_HR, rope_NR, logits_HN, 1) * (scale * LOG2E)
        logits_HN = tl.where(known_N[None, :], logits_HN, -1e30)
        new_top_H = tl.maximum(top_H, tl.max(logits_HN, axis=1))
        p_HN = tl.where(known_N[None, :], tl.exp2(logits_HN - new_top_H[:, None]), 0.0)
        shrink_H = tl.exp2(top_H - new_top_H)
        top_H, sum_H = new_top_H, sum_H * shrink_H + tl.sum(p_HN, axis=1)
        p_HN, new_GHC = p_HN.to(q_ptr.dtype.element_ty), ()
        for g in tl.static_range(GROUPS):
            new_GHC = new_GHC + (tl.dot(p_HN, value_GNC[g], out_GHC[g] * shrink_H[:, None], input_precision="ieee"),)
        out_GHC = new_GHC
    divisor_H = tl.where(sum_H > 0, sum_H, 1.0)
    lse_H = tl.where(sum_H > 0, (top_H + tl.log2(divisor_H)) / LOG2E, float("-inf"))
    tl.store(lse_ptr + t * H + h, lse_H, mask=real_H)
    for g in tl.static_range(GROUPS):
        c = g * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        at = out_ptr + ((t * H + h) * C)[:, None] + c
        tl.store(at, (out_GHC[g] / divisor_H[:, None]).to(out_ptr.dtype.element_ty), mask=real_H[:, None] & (c < C))


@triton.jit
def _key_gradients(
    q_ptr, latent_ptr, slot_ptr, count_ptr, grad_out_ptr, lse_ptr, delta_ptr, ds_ptr, grad_ptr, scale, K, H, C, R,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr, BLOCK_R: tl.constexpr,
    ATOMIC: tl.constexpr,
):  # fmt: skip
    """ds of every n-th block of a query's keys, and what these keys get: added to [P, Z, L], or rows [T, K, L]."""
    t = tl.program_id(0).to(tl.int64)
    h, n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    L = C + R
    real_H = h < H
    q_GHC = rows(q_ptr, (t * H + h) * L, real_H, C, BLOCK_C, GROUPS)
    q_HR = rows(q_ptr + C, (t * H + h) * L, real_H, R, BLOCK_R, 1)
    grad_out_GHC = rows(grad_out_ptr, (t * H + h) * C, real_H, C, BLOCK_C, GROUPS)
    # A query that sees nothing has no blocks.
    lse_H = tl.load(lse_ptr + t * H + h, mask=real_H, other=0.0) * LOG2E
    delta_H = tl.load(delta_ptr + t * H + h, mask=real_H, other=0.0)
    count = tl.load(count_ptr + t)
    for first in range(tl.program_id(1) * BLOCK_N, count, tl.num_programs(1) * BLOCK_N):
        slot_N = tl.load(slot_ptr + t * K + first + n, mask=first + n < K, other=-1).to(tl.int64)
        known_N = slot_N >= 0
        value_GNC = rows(latent_ptr, slot_N * L, known_N, C, BLOCK_C, GROUPS)
        rope_NR = rows(latent_ptr + C, slot_N * L, known_N, R, BLOCK_R, 1)
        logits_HN = products(q_GHC, value_GNC, tl.zeros([BLOCK_H, BLOCK_N], tl.float32), GROUPS)
        logits_HN = products(q_HR, rope_NR, logits_HN, 1) * (scale * LOG2E)
        dp_HN = products(grad_out_GHC, value_GNC, tl.zeros([BLOCK_H, BLOCK_N], tl.float32), GROUPS)
        p_HN = tl.where(known_N[None, :] & real_H[:, None], tl.exp2(logits_HN - lse_H[:, None]), 0.0)
        ds_HN = (p_HN * (dp_HN - delta_H[:, None]) * scale).to(q_ptr.dtype.element_ty)
        at = ds_ptr + ((t * H + h) * K)[:, None] + first + n[None, :]
        tl.store(at, ds_HN, mask=real_H[:, None] & (first + n < K)[None, :])
        p_NH, ds_NH = tl.trans(p_HN.to(q_ptr.dtype.element_ty)), tl.trans(ds_HN)
        row_N = slot_N * L if ATOMIC else (t * K + first + n) * L
        for g in tl.static_range(GROUPS):
            grad_NC = tl.dot(p_NH, grad_out_GHC[g], input_precision="ieee")
            grad_NC = tl.dot(ds_NH, q_GHC[g], grad_NC, input_precision="ieee")
            give(grad_ptr, row_N, known_N, grad_NC, g * BLOCK_C + tl.arange(0, BLOCK_C), C, ATOMIC)
        grad_NR = tl.dot(ds_NH, q_HR[0], input_precision="ieee")
        give(grad_ptr + C, row_N, known_N, grad_NR, tl.arange(0, BLOCK_R), R, ATOMIC)


@triton.jit
def _query_gradients(
    latent_ptr, slot_ptr, count_ptr, ds_ptr, grad_ptr, K, H, C, R,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dq = sum over keys of ds latent."""
    t = tl.program_id(0).to(tl.int64)
    h, n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    L = C + R
    grad_GHC, grad_HR = (), tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    for _ in tl.static_range(GROUPS):
        grad_GHC = grad_GHC + (tl.zeros([BLOCK_H, BLOCK_C], tl.float32),)
    for first in range(0, tl.load(count_ptr + t), BLOCK_N):
        slot_N = tl.load(slot_ptr + t * K + first + n, mask=first + n < K, other=-1).to(tl.int64)
        known_N = slot_N >= 0
        at = ds_ptr + ((t * H + h) * K)[:, None] + first + n[None, :]
        ds_HN = tl.load(at, mask=(h < H)[:, None] & (first + n < K)[None, :], other=0.0)
        value_GNC = rows(latent_ptr, slot_N * L, known_N, C, BLOCK_C, GROUPS)
        rope_NR = rows(latent_ptr + C, slot_N * L, known_N, R, BLOCK_R, 1)
        new_GHC = ()
        for g in tl.static_range(GROUPS):
            new_GHC = new_GHC + (tl.dot(ds_HN, value_GNC[g], grad_GHC[g], input_precision="ieee"),)
        grad_GHC, grad_HR = new_GHC, tl.dot(ds_HN, rope_NR[0], grad_HR, input_precision="ieee")
    for g in tl.static_range(GROUPS):
        store(grad_ptr, (t * H + h) * L, h < H, grad_GHC[g], g * BLOCK_C + tl.arange(0, BLOCK_C), C)
    store(grad_ptr + C, (t * H + h) * L, h < H, grad_HR, tl.arange(0, BLOCK_R), R)


FORWARD, KEY_GRADIENTS, QUERY_GRADIENTS = Tiling(64, 256, 8, 2), Tiling(64, 128, 4, 1), Tiling(64, 512, 8, 2)
# Measured on an H200 (docs/performance-tried.md).


class Tilings(NamedTuple):
    """Of the three kernels, and in how many programs a query's keys are gone through for their gradients."""

    forward: Tiling = FORWARD
    keys: Tiling = KEY_GRADIENTS
    queries: Tiling = QUERY_GRADIENTS
    shares: int = 1


def sparse_mla(
    q_THL: Tensor,
    latent_PZL: Tensor,
    keys_TK: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    value_dim: int,
    tilings: Tilings | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.sparse_mla`, for selected keys and a pool in one piece. Raises ValueError without a selection."""
    if keys_TK is None:
        raise ValueError("sparse_mla[trained] needs selected keys; without them, impl='masked'")
    where = (page_table_BN, row_T, end_T)
    return _Trained.apply(q_THL, latent_PZL, keys_TK, where, scale, value_dim, tilings or Tilings())


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THL, latent_PZL, keys_TK, where, scale: float, value_dim: int, tilings: Tilings):
        q_THL, latent_PZL = q_THL.contiguous(), latent_PZL.contiguous()
        out_THC = q_THL.new_empty(*q_THL.shape[:2], value_dim)
        lse_TH = torch.empty(q_THL.shape[:2], dtype=torch.float32, device=q_THL.device)
        sizes, blocks = _sizes(q_THL, keys_TK, value_dim, tilings.forward)
        for part in _pieces(len(q_THL), _SLOTS // keys_TK.shape[1]):
            slots = _slots(latent_PZL, keys_TK, where, part)
            results = out_THC[part], lse_TH[part]
            _forward[(len(slots[1]),)](q_THL[part], latent_PZL, *slots, *results, scale, *sizes, **blocks)
        ctx.save_for_backward(q_THL, latent_PZL, keys_TK, *where, out_THC, lse_TH)
        ctx.scale, ctx.tilings = scale, tilings
        ctx.set_materialize_grads(False)
        return out_THC, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_THC: Tensor | None, grad_lse_TH: Tensor | None):
        q_THL, latent_PZL, keys_TK, *where, out_THC, lse_TH = ctx.saved_tensors
        tilings, (num_queries, num_heads, width), num_keys = ctx.tilings, q_THL.shape, keys_TK.shape[1]
        grad_out_THC = torch.zeros_like(out_THC) if grad_out_THC is None else grad_out_THC.contiguous()
        in_order = torch.are_deterministic_algorithms_enabled()
        grad_q = torch.empty_like(q_THL)
        grad_SL = torch.zeros(latent_PZL.shape, dtype=torch.float32, device=q_THL.device).flatten(0, 1)
        at_once = _DS // (num_keys * max(num_heads, width if in_order else 0))
        sizes, of_keys = _sizes(q_THL, keys_TK, out_THC.shape[-1], tilings.keys)
        _, of_queries = _sizes(q_THL, keys_TK, out_THC.shape[-1], tilings.queries)
        for part in _pieces(num_queries, at_once):
            slots = slot_TK, _ = _slots(latent_PZL, keys_TK, where, part)
            delta_TH = (grad_out_THC[part].float() * out_THC[part]).sum(dim=-1)
            if grad_lse_TH is not None:
                delta_TH -= grad_lse_TH[part]
            ds_THK = q_THL.new_empty(len(slot_TK), num_heads, num_keys)
            to = grad_SL.new_empty(slot_TK.numel(), width) if in_order else grad_SL
            of = grad_out_THC[part], lse_TH[part], delta_TH, ds_THK, to
            _key_gradients[(len(slot_TK), tilings.shares)](
                q_THL[part], latent_PZL, *slots, *of, ctx.scale, *sizes, ATOMIC=not in_order, **of_keys
            )
            _query_gradients[(len(slot_TK),)](latent_PZL, *slots, ds_THK, grad_q[part], *sizes, **of_queries)
            if in_order:
                add_rows(grad_SL, slot_TK.flatten(), to)
        return grad_q, grad_SL.to(latent_PZL.dtype).view(latent_PZL.shape), None, None, None, None, None


def _pieces(total: int, at_once: int) -> list[slice]:
    at_once = max(1, at_once)
    return [slice(first, first + at_once) for first in range(0, total, at_once)]


def _slots(latent_PZL: Tensor, keys_TK: Tensor, where: Sequence[Tensor], part: slice) -> tuple[Tensor, Tensor]:
    page_table_BN, row_T, end_T = where
    return slots_or_none(keys_TK[part], page_table_BN, row_T[part], end_T[part], latent_PZL.shape[1])


def _sizes(q_THL: Tensor, keys_TK: Tensor, value_dim: int, tiling: Tiling) -> tuple[tuple[int, ...], dict[str, int]]:
    """(K, H, C, R), and what a kernel is compiled for."""
    _, num_heads, width = q_THL.shape
    if num_heads > MAX_HEADS:
        raise ValueError(f"sparse_mla[trained] takes up to {MAX_HEADS} heads, got {num_heads}; use impl='chunked'")
    values = min(tiling.values, max(16, triton.next_power_of_2(value_dim)))
    blocks = {
        "BLOCK_H": max(16, triton.next_power_of_2(num_heads)),
        "BLOCK_N": tiling.keys,
        "BLOCK_C": values,
        "GROUPS": triton.cdiv(value_dim, values),
        "BLOCK_R": max(16, triton.next_power_of_2(width - value_dim)),
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    return (keys_TK.shape[1], num_heads, value_dim, width - value_dim), blocks
