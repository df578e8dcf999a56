"""The sum over a token's routed experts, whose weights are kept as codes under scales."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import refuse_gradient, unknown_impl
from glm5.kernels.quantized_experts import cuda
from glm5.kernels.quantized_experts.reference import quantized_experts as _reference
from glm5.kernels.quantized_linear import refusal
from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.kernels.triton_support import chosen


def quantized_experts(
    x_TD: Tensor,
    gate_up_proj: QuantizedWeight,
    down_proj: QuantizedWeight,
    weight_TA: Tensor,
    expert_TA: Tensor,
    plus_TD: Tensor | None = None,
    *,
    impl: Literal["auto", "reference", "invariant", "triton", "cuda"] = "auto",
) -> Tensor:
    """out[t] = sum over experts e of t: down_e(silu(gate_e x) * up_e x) * weight[t, e], [T, D] in x's dtype.

    `gate_up_proj` [E, 2F, D] holds gate rows first, `down_proj` [E, D, F]; what each multiplies is quantized per row
    where its format says so. Terms are rounded to x's dtype and summed in it, in expert order, as in `grouped_experts`.

    `plus_TD`: added to that, when it is rounded.

    `invariant`: a row's result does not depend on the others, bit for bit. `triton`: on a GPU, codes are widened in
    registers; terms are summed in float32. `cuda`: likewise, for few tokens and int4 codes on Hopper. No gradient
    passes.
    """
    if impl == "auto":
        impl = _choose(x_TD, gate_up_proj, down_proj, expert_TA)
    if impl == "invariant":
        refuse_gradient("quantized_experts[invariant]", x_TD, weight_TA, plus_TD)
    if impl in ("reference", "invariant"):
        out_TD = _reference(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, invariant=impl == "invariant")
        return out_TD if plus_TD is None else out_TD + plus_TD
    if impl == "triton":
        if why := refusal(gate_up_proj) or refusal(down_proj):
            raise ValueError(f"quantized_experts[triton] {why}; use impl='reference'")
        from glm5.kernels.quantized_experts.triton import quantized_experts as run

        return run(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, plus_TD=plus_TD)
    if impl == "cuda":
        return cuda.quantized_experts(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, plus_TD)
    raise unknown_impl("quantized_experts", impl, ("reference", "invariant", "triton", "cuda"))


def _choose(
    x_TD: Tensor, gate_up_proj: QuantizedWeight, down_proj: QuantizedWeight, expert_TA: Tensor
) -> Literal["reference", "triton", "cuda"]:
    if not chosen(x_TD, gate_up_proj.scale) or refusal(gate_up_proj) or refusal(down_proj):
        return "reference"
    return "triton" if cuda.refusal(x_TD, gate_up_proj, down_proj, expert_TA) else "cuda"
