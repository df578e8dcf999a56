"""Scales of least squared error for integers, from many starts."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.ssz.native import available
from glm5.kernels.ssz.native import ssz as _native
from glm5.kernels.ssz.reference import ssz as _reference
from glm5.kernels.triton_support import chosen


def ssz(
    w_BOGI: Tensor,
    h_BGI: Tensor | None,
    *,
    quant_min: float,
    quant_max: float,
    starts: tuple[float, ...],
    steps: int,
    polish: int,
    impl: Literal["auto", "reference", "native", "triton"] = "auto",
) -> Tensor:
    """The scale [B, O, G] of w's rows of I elements with the least sum of h (w - scale q)^2 that steps lead to.

    Starts are factors of max|w| / quant_max. `h_BGI` >= 0 weighs elements alike in every one of O rows; None: 1.
    """
    if impl == "auto":
        if chosen(w_BOGI) and w_BOGI.shape[-1] <= 1 << 14:
            impl = "triton"
        else:
            impl = "native" if w_BOGI.is_cpu and available() else "reference"
    if impl == "reference":
        return _reference(w_BOGI, h_BGI, quant_min, quant_max, starts, steps, polish)
    if impl == "native":
        return _native(w_BOGI, h_BGI, quant_min, quant_max, starts, steps, polish)
    if impl == "triton":
        from glm5.kernels.ssz.triton import ssz as run

        return run(w_BOGI, h_BGI, quant_min, quant_max, starts, steps, polish)
    raise unknown_impl("ssz", impl, ("reference", "native", "triton"))
