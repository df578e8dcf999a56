"""The router in one kernel: programs share out the product over experts and columns, and the last one to arrive for
some tokens adds up their scores, in order, and chooses.

One group of experts only. A score that is no number counts as the lowest, so that experts are always valid.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton_fp8 import last_to_arrive, wait_for_earlier
from glm5.kernels.triton_support import arrivals, dependent_launch

_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _choose(
    logit_TE,
    bias_E,
    t,
    weight_ptr,
    expert_ptr,
    T,
    scaling_factor,
    num_experts: tl.constexpr,
    A: tl.constexpr,
    NORM: tl.constexpr,
):
    """The A best of p + bias, in ascending order of experts, and their weights; ties go to the smaller expert."""
    e = tl.arange(0, logit_TE.shape[1])[None, :]
    p = 1 / (1 + tl.exp(-logit_TE))
    choice = p + bias_E[None, :]
    choice = tl.where(choice == choice, choice, _LOWEST)
    # One number to compare: the score's bits, ordered as integers, then the expert's rank from behind.
    bits = tl.where(e < num_experts, choice, float("-inf")).to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (logit_TE.shape[1] - 1 - e)
    taken = tl.zeros_like(bits)
    for _ in tl.static_range(A):
        best = tl.max(tl.where(taken > 0, -(1 << 63), key), 1)[:, None]
        taken = tl.where(key == best, 1, taken)
    weight = tl.where(taken > 0, p, 0.0)
    if NORM:
        weight = weight / (tl.sum(weight, 1)[:, None] + 1e-20)
    at = t[:, None] * A + tl.cumsum(taken, 1) - 1
    here = (taken > 0) & (t < T)[:, None]
    tl.store(weight_ptr + at, weight * scaling_factor, mask=here)
    tl.store(expert_ptr + at, tl.broadcast_to(e, here.shape), mask=here)


@triton.jit
def _router(
    x_ptr,
    w_ptr,
    bias_ptr,
    logit_ptr,
    weight_ptr,
    expert_ptr,
    arrivals_ptr,
    T,
    D,
    scaling_factor,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    A: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    TILES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    i = tl.arange(0, BLOCK_D)
    steps = tl.cdiv(tl.cdiv(D, BLOCK_D), SPLIT)
    first = tl.program_id(1) * steps
    w_at = w_ptr + tl.minimum(e, E - 1)[:, None] * D + i[None, :]
    x_at = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[None, :] * D + i[:, None]
    logit = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    wait_for_earlier(PDL)
    for step in tl.range(first, min(first + steps, tl.cdiv(D, BLOCK_D)), num_stages=STAGES):
        inside = step * BLOCK_D + i < D
        w = tl.load(w_at + step * BLOCK_D, mask=inside[None, :], other=0.0)
        x = tl.load(x_at + step * BLOCK_D, mask=inside[:, None], other=0.0)
        if w.dtype != x.dtype:
            w, x = w.to(tl.float32), x.to(tl.float32)
        logit += tl.dot(w, x, input_precision="ieee")
    logit_at = logit_ptr + tl.program_id(1).to(tl.int64) * T * E + t.to(tl.int64)[None, :] * E + e[:, None]
    tl.store(logit_at, logit, mask=(t < T)[None, :] & (e < E)[:, None])
    if last_to_arrive(arrivals_ptr, tl.program_id(2), TILES * SPLIT):
        every = tl.arange(0, EXPERTS)
        here = (t < T)[:, None] & (every < E)[None, :]
        total = tl.zeros([BLOCK_T, EXPERTS], tl.float32)
        for split in tl.static_range(SPLIT):
            part = logit_ptr + split * T.to(tl.int64) * E + t.to(tl.int64)[:, None] * E + every[None, :]
            total += tl.load(part, mask=here, other=0.0, cache_modifier=".cg")
        bias = tl.load(bias_ptr + every, mask=every < E, other=0.0)
        _choose(total, bias, t, weight_ptr, expert_ptr, T, scaling_factor, E, A, NORM)


class Tiling(NamedTuple):
    """Tokens, experts and columns of a tile, splits of the columns, warps, stages of loads."""

    block_t: int
    block_e: int
    block_d: int
    split: int
    warps: int = 4
    stages: int = 4


def tiling_for(num_tokens: int) -> Tiling:
    """What was measured as fastest on H200 (docs/performance.md)."""
    if num_tokens <= 8:
        return Tiling(8, 64, 128, 12)
    if num_tokens <= 256:
        return Tiling(16, 64, 128, 6)
    return Tiling(32, 128, 128, 1, warps=8)


def refusal(x_TD: Tensor, weight_ED: Tensor, n_group: int, topk_group: int, top_k: int) -> str | None:
    """Why these cannot be handled; None if they can."""
    if n_group != 1 or topk_group != 1:
        return f"needs one group of experts, got {n_group=}, {topk_group=}"
    if x_TD.dtype == torch.float64 or weight_ED.shape[0] > 1024 or top_k > 32:
        return f"needs at most 1024 experts and 32 choices in up to float32, got {list(weight_ED.shape)} {x_TD.dtype}"
    return None


@torch.no_grad()
def router(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.router`, without gradients. Raises ValueError where `refusal` has a reason."""
    if reason := refusal(x_TD, weight_ED, n_group, topk_group, top_k):
        raise ValueError(f"router[triton] {reason}; use impl='reference'")
    (num_tokens, width), num_experts = x_TD.shape, weight_ED.shape[0]
    device = x_TD.device
    weight_TA = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    expert_TA = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    if not num_tokens:
        return weight_TA, expert_TA
    cut = tiling or tiling_for(num_tokens)
    split = min(cut.split, triton.cdiv(width, cut.block_d))
    logit = torch.empty(split, num_tokens, num_experts, dtype=torch.float32, device=device)
    _router[(triton.cdiv(num_experts, cut.block_e), split, triton.cdiv(num_tokens, cut.block_t))](
        x_TD.contiguous(),
        weight_ED.contiguous(),
        bias_E.float(),
        logit,
        weight_TA,
        expert_TA,
        arrivals(device),
        num_tokens,
        width,
        float(scaling_factor),
        E=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        A=top_k,
        NORM=norm_topk_prob,
        BLOCK_T=cut.block_t,
        BLOCK_E=cut.block_e,
        BLOCK_D=cut.block_d,
        SPLIT=split,
        STAGES=cut.stages,
        num_warps=cut.warps,
        **dependent_launch(device),
    )
    return weight_TA, expert_TA
