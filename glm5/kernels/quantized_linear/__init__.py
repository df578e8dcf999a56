"""Linear layer with integer or FP8 codes as weight."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.quantized_linear import cuda
from glm5.kernels.quantized_linear.tiling import measured_for
from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.kernels.row_codes import Quantized


def quantized_linear(
    x_TD: Tensor,
    weight: QuantizedWeight,
    x_quantized: Quantized | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """`x_TD` times the transpose of `weight` [O, D]: [T, O] in x's dtype. x is quantized first if the format says so.

    `triton`: on a GPU, codes are unpacked in registers; groups of a multiple of 64. `cuda`: up to 128 tokens with int8
    codes on Hopper; `auto` takes it where `kernels/tuned` has it as faster.

    `x_quantized`: `token_quant` of x as int8, if the caller has it, for int8 weights.

    Inference only: no gradient passes. Raises ValueError if codes and scale do not match (QuantizedWeight.check).
    """
    if impl == "triton" and (why := refusal(weight)):
        raise ValueError(f"quantized_linear[triton] {why}; use impl='reference'")
    return TABLE.module(impl, x_TD, weight).quantized_linear(x_TD, weight, x_quantized=x_quantized)


def refusal(weight: QuantizedWeight) -> str | None:
    """Why the Triton kernels cannot multiply with `weight`; None if they can."""
    group = weight.format.group
    if group is not None and group % 64:
        return f"takes groups of a multiple of 64, got {group}"
    if weight.codes.shape[-1] % 16:
        return f"needs rows of a multiple of 16 bytes, got {weight.codes.shape[-1]}"
    return None


def _fits_cuda(x_TD: Tensor, weight: QuantizedWeight) -> bool:
    measured = None if refusal(weight) else measured_for(x_TD, weight)
    return measured is not None and bool(measured.cluster) and not cuda.refusal(x_TD, weight)


TABLE = Table(
    __name__,
    cuda=Impl("int8 codes, where kernels/tuned says so", on="hopper", when=_fits_cuda, gradient=False),
    triton=Impl("codes widened in registers", on="triton", when=lambda _, w: not refusal(w), gradient=False),
    reference=Impl("the definition"),
)
