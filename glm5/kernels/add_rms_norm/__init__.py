"""Sum and norm of the residual stream, in one pass."""

from typing import Literal

from torch import Tensor

from glm5.kernels.add_rms_norm.reference import add_rms_norm as _reference
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.row_codes import Kind, quantize
from glm5.kernels.triton_support import chosen

Impl = Literal["auto", "reference", "triton"]


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """(out, sum), [T, D] each: sum = x + residual and its `rms_norm`, both in x's dtype."""
    if impl == "auto":
        impl = "triton" if chosen(x_TD, residual_TD, weight_D) else "reference"
    if impl == "triton":
        from glm5.kernels.rms_norm.triton import add_rms_norm as run

        return run(x_TD, residual_TD, weight_D, eps)
    if impl == "reference":
        return _reference(x_TD, residual_TD, weight_D, eps)
    raise unknown_impl("add_rms_norm", impl, ("reference", "triton"))


def add_rms_norm_quantized(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, kind: Kind = "blocks", *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, sum, codes, scale): `add_rms_norm`, and `row_codes.quantize` of out, for the products that read it."""
    if impl == "auto":
        impl = "triton" if chosen(x_TD, residual_TD, weight_D) else "reference"
    if impl == "triton":
        from glm5.kernels.rms_norm.triton import add_rms_norm_quantized as run

        return run(x_TD, residual_TD, weight_D, eps, kind)
    if impl == "reference":
        out_TD, total_TD = _reference(x_TD, residual_TD, weight_D, eps)
        return out_TD, total_TD, *quantize(out_TD, kind, impl="reference")
    raise unknown_impl("add_rms_norm", impl, ("reference", "triton"))
