"""The sum over a token's routed experts."""

from typing import Literal

import torch
from torch import Tensor

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.grouped_experts import cuda
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.kernels.grouped_experts.grouped_mm import grouped_experts as _grouped_mm
from glm5.kernels.grouped_experts.grouped_mm import refusal
from glm5.kernels.grouped_experts.invariant import grouped_experts as _invariant
from glm5.kernels.grouped_experts.on_device import grouped_experts as _on_device
from glm5.kernels.grouped_experts.one_by_one import MAX_PAIRS
from glm5.kernels.grouped_experts.one_by_one import grouped_experts as _one_by_one
from glm5.kernels.grouped_experts.reference import grouped_experts as _reference
from glm5.kernels.grouped_experts.shared import SharedExpert
from glm5.kernels.grouped_experts.trained import grouped_experts as _trained
from glm5.kernels.triton_support import chosen

__all__ = ["FEW_TOKENS", "ExpertOutputs", "SharedExpert", "expert_outputs", "grouped_experts"]

FEW_TOKENS = 32  # up to here products in FP8 take rows as they are


def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    *,
    shared: SharedExpert | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
    impl: Literal[
        "auto", "reference", "trained", "grouped_mm", "on_device", "one_by_one", "invariant", "triton", "cuda"
    ] = "auto",
) -> Tensor:
    """out[t] = sum over experts e of t: down_e(silu(gate_e x) * up_e x) * weight[t, e], [T, D] in x's dtype.

    `gate_up_proj` [E, 2F, D] holds gate rows first, `down_proj` [E, D, F]; either may be BlockScaled (then through
    fp8_linear, no gradient; the gate_up scale has 2 * ceil(F/128) rows, gate's first). Each term is rounded to x's
    dtype and summed in it, in expert order (model spec 3.6). Differentiable in x, both weights and weight_TA.

    `shared`: an expert that every token visits with weight 1; its term comes last. `quantized`: what `act_quant` makes
    of x, where that is known; it is what `triton` reads of more than FEW_TOKENS.

    `trained`: with plain weights and a gradient, in grouped products that do not wait for a GPU; sums in float32.
    `invariant`: a row's result does not depend on the others, bit for bit; no gradient. `grouped_mm`: on a CPU, with
    plain weights; no gradient. `one_by_one`: likewise, for a token or two. `on_device`: with plain weights on a GPU,
    without waiting for it; no gradient. `triton`: on a GPU, BlockScaled weights, no
    gradient. It sums in float32, does not quantize x for few tokens, and rounds terms to x's dtype for many only:
    nearer to float64 than the reference. `cuda`: many tokens on Hopper, likewise.
    """
    if impl == "auto":
        impl = _choose(x_TD, gate_up_proj, down_proj, expert_TA.numel(), shared)
    if impl == "triton":
        from glm5.kernels.grouped_experts.triton import grouped_experts as fused

        return fused(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, shared, quantized=quantized)
    if impl == "cuda":
        return cuda.grouped_experts(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, shared, quantized=quantized)
    if impl == "invariant":
        return _invariant(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, shared)
    if impl == "reference":
        run = _reference
    elif impl == "grouped_mm":
        run = _grouped_mm
    elif impl == "one_by_one":
        run = _one_by_one
    elif impl == "on_device":
        run = _on_device
    elif impl == "trained":
        run = _trained
    else:
        allowed = ("reference", "trained", "grouped_mm", "on_device", "one_by_one", "invariant", "triton", "cuda")
        raise unknown_impl("grouped_experts", impl, allowed)
    out_TD = run(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA)
    return out_TD if shared is None else out_TD + shared(x_TD)


def expert_outputs(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    *,
    shared: SharedExpert | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> ExpertOutputs | None:
    """What `grouped_experts` would add up, for those who do so on their way; None where only sums are to be had."""
    impl = _choose(x_TD, gate_up_proj, down_proj, expert_TA.numel(), shared)
    given = x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, shared, quantized
    if impl == "cuda":
        return cuda.expert_outputs(*given)
    if impl == "triton":
        from glm5.kernels.grouped_experts.triton import expert_outputs as run

        return run(*given)
    return None


def _choose(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    num_pairs: int,
    shared: SharedExpert | None,
) -> Literal["reference", "trained", "grouped_mm", "on_device", "one_by_one", "triton", "cuda"]:
    if isinstance(gate_up_proj, BlockScaled) and isinstance(down_proj, BlockScaled):
        if not chosen(x_TD, gate_up_proj.scale):
            return "reference"
        num_experts, _, inner = down_proj.data.shape
        is_faster = cuda.is_faster(num_pairs, num_experts, inner)
        return "cuda" if is_faster and not cuda.refusal(x_TD, gate_up_proj, down_proj, shared) else "triton"
    if isinstance(gate_up_proj, BlockScaled) or isinstance(down_proj, BlockScaled):
        return "reference"
    if torch.is_grad_enabled():
        return "trained" if x_TD.is_cuda and x_TD.dtype == torch.bfloat16 else "reference"
    if x_TD.is_cpu and 0 < num_pairs <= MAX_PAIRS:
        return "one_by_one"
    if x_TD.is_cuda:
        return "on_device"
    return "grouped_mm" if refusal(x_TD, gate_up_proj, down_proj) is None else "reference"
