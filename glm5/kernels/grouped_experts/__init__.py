"""The sum over a token's routed experts."""

import torch
from torch import Tensor

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.grouped_experts import cuda
from glm5.kernels.grouped_experts.expert_outputs import FEW_TOKENS, ExpertOutputs
from glm5.kernels.grouped_experts.grouped_mm import refusal
from glm5.kernels.grouped_experts.one_by_one import MAX_PAIRS
from glm5.kernels.grouped_experts.shared import SharedExpert, Weight

__all__ = ["FEW_TOKENS", "ExpertOutputs", "SharedExpert", "expert_outputs", "grouped_experts"]


def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Weight,
    down_proj: Weight,
    weight_TA: Tensor,
    expert_TA: Tensor,
    *,
    shared: SharedExpert | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
    impl: str = "auto",
) -> Tensor:
    """out[t] = sum over experts e of t: down_e(silu(gate_e x) * up_e x) * weight[t, e], [T, D] in x's dtype.

    `gate_up_proj` [E, 2F, D] holds gate rows first, `down_proj` [E, D, F]; either may be BlockScaled (then through
    fp8_linear, no gradient; the gate_up scale has 2 * ceil(F/128) rows, gate's first). Each expert's output is
    rounded to x's dtype and summed in it, in expert order (model spec 3.6). Differentiable in x, weights and weight_TA.

    `shared`: an expert that every token visits with weight 1; its output is added last. `quantized`: `act_quant` of x,
    if the caller has it; `triton` reads it for more than FEW_TOKENS.

    `trained`: plain weights with a gradient, in grouped GEMMs without host synchronization; sums in float32. The others
    have no gradient. `invariant`, and `invariant_triton` on a GPU: a row's result does not depend on other rows,
    bit for bit; with the latter, for any number of rows. `grouped_mm`: plain weights on a CPU; `one_by_one`: the
    same for one or two tokens. `on_device`: plain weights on a GPU without host synchronization. `triton`:
    BlockScaled weights on a GPU; it sums in float32, does not quantize x for few tokens, and rounds outputs to x's
    dtype for many tokens only, so it is more accurate than the reference. `cuda`: many tokens on Hopper, likewise.
    """
    run = TABLE.module(impl, x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, shared).grouped_experts
    return run(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, shared, quantized)


def expert_outputs(
    x_TD: Tensor,
    gate_up_proj: Weight,
    down_proj: Weight,
    weight_TA: Tensor,
    expert_TA: Tensor,
    *,
    shared: SharedExpert | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> ExpertOutputs | None:
    """The summands of `grouped_experts`, for callers that sum them later; None if only sums are available."""
    given = x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, shared
    run = getattr(TABLE.module("auto", *given), "expert_outputs", None)
    return None if run is None else run(*given, quantized)


def _is_fp8(_: Tensor, gate_up: Weight, down: Weight, *_given: object) -> bool:
    return isinstance(gate_up, BlockScaled) and isinstance(down, BlockScaled)


def _is_plain(_: Tensor, gate_up: Weight, down: Weight, *_given: object) -> bool:
    return isinstance(gate_up, Tensor) and isinstance(down, Tensor)


def _fits_cuda(x_TD: Tensor, gate_up: Weight, down: Weight, _: Tensor, expert_TA: Tensor, shared: SharedExpert | None):
    if not isinstance(gate_up, BlockScaled) or not isinstance(down, BlockScaled):
        return False
    num_experts, inner = len(down.data), down.data.shape[2]
    return cuda.is_faster(expert_TA.numel(), num_experts, inner) and not cuda.refusal(x_TD, gate_up, down, shared)


def _fits_one_by_one(x_TD: Tensor, gate_up: Weight, down: Weight, _: Tensor, expert_TA: Tensor, *_given: object):
    return _is_plain(x_TD, gate_up, down) and 0 < expert_TA.numel() <= MAX_PAIRS


def _fits_grouped_mm(x_TD: Tensor, gate_up: Weight, down: Weight, *_given: object) -> bool:
    return refusal(x_TD, gate_up, down) is None


TABLE = Table(
    __name__,
    cuda=Impl("FP8, 16 or 32 to 80 rows an expert", on="hopper", when=_fits_cuda, gradient=False),
    triton=Impl("FP8, other numbers of rows; tiling_for has four ways", on="triton", when=_is_fp8, gradient=False),
    on_device=Impl("plain weights, nothing waits for the device", on="gpu", when=_is_plain, gradient=False),
    trained=Impl(
        "bfloat16", on="gpu", when=lambda x, *given: _is_plain(x, *given) and x.dtype == torch.bfloat16, gradient=True
    ),
    one_by_one=Impl("a token or two", on="cpu", when=_fits_one_by_one, gradient=False),
    grouped_mm=Impl(
        "plain, in one product",
        on="cpu",
        when=_fits_grouped_mm,
        gradient=False,
    ),
    reference=Impl("the definition"),
    invariant=Impl("a row's result does not depend on the others, bit for bit"),
    invariant_triton=Impl("the same on a GPU", on="triton", module="triton_invariant"),
)
