"""A block of GPTQ's columns, rounded one by one."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.gptq_block.reference import gptq_block as _reference
from glm5.kernels.triton_support import chosen


def gptq_block(
    w_BOK: Tensor,
    factor_BKK: Tensor,
    scale_BOK: Tensor,
    *,
    quant_min: float,
    quant_max: float,
    fp8: bool,
    impl: Literal["auto", "reference", "triton"] = "auto",
) -> tuple[Tensor, Tensor]:
    """(codes in w's dtype, errors over the factor's diagonal), [B, O, K] both. `factor_BKK`: upper triangular.

    `scale_BOK` has K columns or 1. Codes are whole numbers of `quant_min` to `quant_max`, or e4m3 numbers for `fp8`.
    """
    if impl == "auto":
        impl = "triton" if chosen(w_BOK, factor_BKK, scale_BOK) else "reference"
    if impl == "reference":
        return _reference(w_BOK, factor_BKK, scale_BOK, quant_min, quant_max, fp8=fp8)
    if impl == "triton":
        from glm5.kernels.gptq_block.triton import gptq_block as run

        return run(w_BOK, factor_BKK, scale_BOK, quant_min, quant_max, fp8=fp8)
    raise unknown_impl("gptq_block", impl, ("reference", "triton"))
