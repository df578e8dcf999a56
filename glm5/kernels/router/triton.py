"""The router in two kernels: a split-K product, then one warp per token sums the splits in order and chooses. (In a
single kernel, where the last program to arrive chooses for several tokens, choosing takes 8 to 16 us on an H200.)

One group of experts only. A NaN score counts as the lowest, so that experts are always valid.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait, prefetch
from glm5.kernels.triton_support import dependent_launch

_FEW = 32  # tokens up to which the product is memory-bound
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _scores(
    x_ptr,
    w_ptr,
    logit_ptr,
    T,
    D,
    E,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """logit [SPLIT, T, E]: partial sums of x W^T over splits of the columns.

    AHEAD: prefetch weights to the L2 cache while the previous kernel computes x.
    """
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    i = tl.arange(0, BLOCK_D)
    steps = tl.cdiv(tl.cdiv(D, BLOCK_D), SPLIT)
    first = tl.program_id(1) * steps
    w_at = w_ptr + tl.minimum(e, E - 1)[:, None] * D + i[None, :]
    x_at = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[None, :] * D + i[:, None]
    logit = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    if AHEAD:
        LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth  # weights of 128 bytes
        line = tl.arange(0, BLOCK_D // LINE) * LINE
        for step in range(first, min(first + steps, tl.cdiv(D, BLOCK_D))):
            at = w_ptr + tl.minimum(e, E - 1)[:, None] * D
            prefetch(at + tl.minimum(step * BLOCK_D + line, D - 1)[None, :])
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    for step in tl.range(first, min(first + steps, tl.cdiv(D, BLOCK_D)), num_stages=STAGES):
        inside = step * BLOCK_D + i < D
        w = tl.load(w_at + step * BLOCK_D, mask=inside[None, :], other=0.0)
        x = tl.load(x_at + step * BLOCK_D, mask=inside[:, None], other=0.0)
        if w.dtype != x.dtype:
            w, x = w.to(tl.float32), x.to(tl.float32)
        logit += tl.dot(w, x, input_precision="ieee")
    at = tl.program_id(1) * tl.cast(T, tl.int64) * E + t.to(tl.int64)[None, :] * E + e[:, None]
    tl.store(logit_ptr + at, logit, mask=(t < T)[None, :] & (e < E)[:, None])


@triton.jit
def _choose(
    logit_ptr,
    bias_ptr,
    weight_ptr,
    expert_ptr,
    T,
    E,
    scaling_factor,
    EXPERTS: tl.constexpr,
    A: tl.constexpr,
    NORM: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The A best experts of a token by p + bias, ascending, and their weights; ties go to the smaller expert."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)
    pdl_wait(PDL)
    logit = tl.zeros([EXPERTS], tl.float32)
    for split in tl.static_range(SPLIT):
        logit += tl.load(logit_ptr + (split * tl.cast(T, tl.int64) + t) * E + e, mask=e < E, other=0.0)
    pdl_launch_dependents(PDL)
    p = 1 / (1 + tl.exp(-logit))
    choice = p + bias
    choice = tl.where(choice == choice, choice, _LOWEST)
    # As integers of the same order: a warp has the largest of its 32 bit integers in one instruction.
    bits = tl.where(e < E, choice, float("-inf")).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    taken = tl.zeros_like(bits)
    for _ in tl.static_range(A):
        best = tl.max(key, 0)
        first = tl.min(tl.where(key == best, e, EXPERTS), 0)
        taken = tl.where(e == first, 1, taken)
        key = tl.where(e == first, -(2**31), key)
    weight = tl.where(taken > 0, p, 0.0)
    if NORM:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    at = t * A + tl.cumsum(taken, 0) - 1
    tl.store(weight_ptr + at, weight * scaling_factor, mask=taken > 0)
    tl.store(expert_ptr + at, e, mask=taken > 0)


class Tiling(NamedTuple):
    """Tokens, experts and columns of a tile, splits of the columns, warps, stages of loads."""

    block_t: int
    block_e: int
    block_d: int
    split: int
    warps: int = 4
    stages: int = 4


def tiling_for(num_tokens: int) -> Tiling:
    """Without an entry in `kernels/tuned`: what was fastest on an H200 (docs/performance-kernels.md)."""
    if num_tokens <= 8:
        return Tiling(8, 32, 128, 12, warps=2)
    if num_tokens <= 64:
        return Tiling(16, 64, 128, 6)
    return Tiling(32 if num_tokens <= 128 else 64, 64, 128, min(8, max(1, 2048 // num_tokens)))


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
    tiling = tiling or tuned.find(Tiling, "router", f"E={num_experts} D={width}", num_tokens, device)
    cut = tiling or tiling_for(num_tokens)
    if max(x_TD.itemsize, weight_ED.itemsize) > 2:
        cut = cut._replace(block_d=32)  # float32 products take four times the shared memory
    split = min(cut.split, triton.cdiv(width, cut.block_d))
    logit = torch.empty(split, num_tokens, num_experts, dtype=torch.float32, device=device)
    _scores[(triton.cdiv(num_experts, cut.block_e), split, triton.cdiv(num_tokens, cut.block_t))](
        x_TD.contiguous(),
        weight_ED.contiguous(),
        logit,
        num_tokens,
        width,
        num_experts,
        BLOCK_T=cut.block_t,
        BLOCK_E=cut.block_e,
        BLOCK_D=cut.block_d,
        SPLIT=split,
        STAGES=cut.stages,
        AHEAD=num_tokens <= _FEW,
        num_warps=cut.warps,
        **dependent_launch(device),
    )
    _choose[(num_tokens,)](
        logit,
        bias_E.float(),
        weight_TA,
        expert_TA,
        num_tokens,
        num_experts,
        float(scaling_factor),
        EXPERTS=triton.next_power_of_2(num_experts),
        A=top_k,
        NORM=norm_topk_prob,
        SPLIT=split,
        num_warps=1,
        **dependent_launch(device),
    )
    return weight_TA, expert_TA
