"""Linear layer whose weight is kept as codes under scales."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.quantized_linear import cuda
from glm5.kernels.quantized_linear.reference import quantized_linear as _reference
from glm5.kernels.quantized_linear.tiling import measured_for
from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.kernels.row_codes import Quantized
from glm5.kernels.triton_support import chosen


def quantized_linear(
    x_TD: Tensor,
    weight: QuantizedWeight,
    x_quantized: Quantized | None = None,
    *,
    impl: Literal["auto", "reference", "triton", "cuda"] = "auto",
) -> Tensor:
    """`x_TD` times the transpose of `weight` [O, D]: [T, O] in x's dtype. x is quantized first if the format says so.

    `triton`: on a GPU, codes are widened in registers; groups of a multiple of 64. `cuda`: up to 128 tokens over int8
    codes on Hopper; `auto` takes it where `kernels/tuned` says that it is faster.

    `x_quantized`: `token_quant` of x as int8, for those who have it already; for weights in int8.

    Inference only: no gradient passes. Raises ValueError where codes and scale do not fit (QuantizedWeight.check).
    """
    if impl == "auto":
        impl = _choose(x_TD, weight)
    if impl == "reference":
        return _reference(x_TD, weight, x_quantized)
    if impl == "triton":
        if why := refusal(weight):
            raise ValueError(f"quantized_linear[triton] {why}; use impl='reference'")
        from glm5.kernels.quantized_linear.triton import quantized_linear as run

        return run(x_TD, weight, x_quantized=x_quantized)
    if impl == "cuda":
        return cuda.quantized_linear(x_TD, weight, x_quantized=x_quantized)
    raise unknown_impl("quantized_linear", impl, ("reference", "triton", "cuda"))


def _choose(x_TD: Tensor, weight: QuantizedWeight) -> Literal["reference", "triton", "cuda"]:
    if not chosen(x_TD, weight.scale) or refusal(weight):
        return "reference"
    measured = measured_for(x_TD, weight)
    return "cuda" if measured is not None and measured.cluster and not cuda.refusal(x_TD, weight) else "triton"


def refusal(weight: QuantizedWeight) -> str | None:
    """Why the Triton kernels cannot multiply with `weight`; None if they can."""
    group = weight.format.group
    if group is not None and group % 64:
        return f"takes groups of a multiple of 64, got {group}"
    if weight.codes.shape[-1] % 16:
        return f"needs rows of a multiple of 16 bytes, got {weight.codes.shape[-1]}"
    return None
