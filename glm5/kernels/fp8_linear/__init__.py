"""Linear layer with FP8 weights kept as they are in the checkpoint."""

from typing import Literal

from torch import Tensor

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.fp8_linear.reference import fp8_linear as _reference


def fp8_linear(x_TD: Tensor, weight: BlockScaled, *, impl: Literal["auto", "reference"] = "auto") -> Tensor:
    """`x_TD` times the transpose of `weight` [O, D], [T, O] in x's dtype; x is quantized by `act_quant` first.

    Inference only: backward raises RuntimeError. Raises ValueError where data and scale do not fit (BlockScaled.check).
    """
    if impl in ("auto", "reference"):
        return _reference(x_TD, weight)
    raise unknown_impl("fp8_linear", impl, ("reference",))
