"""Rows of activations as codes under one scale each."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.quantized_weight import Act
from glm5.kernels.token_quant.reference import token_quant as _reference
from glm5.kernels.triton_support import chosen


def token_quant(
    x_TD: Tensor, kind: Act, *, impl: Literal["auto", "reference", "triton"] = "auto"
) -> tuple[Tensor, Tensor]:
    """(codes [T, D] int8 or float8_e4m3fn, scale [T] float32; float64 for float64): scale = amax / 127, or / 448."""
    if impl == "auto":
        impl = "triton" if chosen(x_TD) else "reference"
    if impl == "reference":
        return _reference(x_TD, kind)
    if impl == "triton":
        from glm5.kernels.token_quant.triton import prepare_rows

        codes, scale = prepare_rows(x_TD, kind, halves=False)
        assert scale is not None
        return codes, scale
    raise unknown_impl("token_quant", impl, ("reference", "triton"))
