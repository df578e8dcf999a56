"""Dynamic FP8 quantization of activations."""

from typing import Literal

from torch import Tensor

from glm5.kernels.act_quant.reference import act_quant as _reference
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.triton_support import chosen


def act_quant(x_TD: Tensor, *, impl: Literal["auto", "reference", "triton"] = "auto") -> tuple[Tensor, Tensor]:
    """(x_fp8 [T, D] float8_e4m3fn, scale [T, ceil(D/128)] float32): scale = max(amax, 1e-4) / 448 per 128 values."""
    if impl == "auto":
        impl = "triton" if chosen(x_TD) else "reference"
    if impl == "reference":
        return _reference(x_TD)
    if impl == "triton":
        from glm5.kernels.act_quant.triton import act_quant as run

        return run(x_TD)
    raise unknown_impl("act_quant", impl, ("reference", "triton"))
