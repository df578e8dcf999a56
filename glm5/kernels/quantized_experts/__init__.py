"""The sum over a token's routed experts with integer or FP8 codes as weights."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table, refuse_gradient
from glm5.kernels.quantized_experts import cuda, reference
from glm5.kernels.quantized_linear import refusal
from glm5.kernels.quantized_weight import QuantizedWeight


def quantized_experts(
    x_TD: Tensor,
    gate_up_proj: QuantizedWeight,
    down_proj: QuantizedWeight,
    weight_TA: Tensor,
    expert_TA: Tensor,
    plus_TD: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """out[t] = sum over experts e of t: down_e(silu(gate_e x) * up_e x) * weight[t, e], [T, D] in x's dtype.

    `gate_up_proj` [E, 2F, D] holds gate rows first, `down_proj` [E, D, F]; their inputs are quantized per row if the
    format says so. Each expert's output is rounded to x's dtype and summed in it, as in `grouped_experts`.

    `plus_TD`: added to the rounded sum.

    `invariant`: a row's result does not depend on other rows, bit for bit. `triton`: on a GPU, codes are unpacked in
    registers; sums are float32. `cuda`: likewise, for few tokens and int4 codes on Hopper. No gradient passes.
    """
    if impl == "triton" and (why := refusal(gate_up_proj) or refusal(down_proj)):
        raise ValueError(f"quantized_experts[triton] {why}; use impl='reference'")
    given = x_TD, gate_up_proj, down_proj, weight_TA, expert_TA
    module = TABLE.module(impl, *given)
    if module is not reference:
        return module.quantized_experts(*given, plus_TD=plus_TD)
    if impl == "invariant":
        refuse_gradient("quantized_experts[invariant]", x_TD, weight_TA, plus_TD)
    out_TD = reference.quantized_experts(*given, invariant=impl == "invariant")
    return out_TD if plus_TD is None else out_TD + plus_TD


def _fits_triton(_x_TD: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, *_: Tensor) -> bool:
    return not (refusal(gate_up) or refusal(down))


def _fits_cuda(x_TD: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, _: Tensor, expert_TA: Tensor) -> bool:
    return _fits_triton(x_TD, gate_up, down) and not cuda.refusal(x_TD, gate_up, down, expert_TA)


TABLE = Table(
    __name__,
    cuda=Impl("few tokens over int4 codes in bfloat16", on="hopper", when=_fits_cuda, gradient=False),
    triton=Impl("codes widened in registers", on="triton", when=_fits_triton, gradient=False),
    reference=Impl("the definition"),
    invariant=Impl("the same in tiles of a fixed number of rows", module="reference"),
)
