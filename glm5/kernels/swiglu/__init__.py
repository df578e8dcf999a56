"""The gated unit of MLPs and experts, and its gradient with a weight for each row."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.row_codes import Kind, quantize
from glm5.kernels.swiglu.reference import swiglu as _reference
from glm5.kernels.swiglu.reference import swiglu_backward as _reference_backward
from glm5.kernels.triton_support import chosen, runs_on

Impl = Literal["auto", "reference", "triton"]


def swiglu(gate_up_GY: Tensor, *, impl: Impl = "auto") -> Tensor:
    """silu(gate) * up of rows [G, 2F], gates first: [G, F] in their dtype. No gradient: see `swiglu_backward`."""
    if impl == "triton" or (impl == "auto" and runs_on(gate_up_GY)):
        from glm5.kernels.swiglu.triton import swiglu as run

        return run(gate_up_GY)
    if impl in ("auto", "reference"):
        return _reference(gate_up_GY)
    raise unknown_impl("swiglu", impl, ("reference", "triton"))


def swiglu_quantized(gate_up_GY: Tensor, kind: Kind, *, impl: Impl = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """(out [G, F], codes, scale): `swiglu`, and `row_codes.quantize` of it, for the product that reads it."""
    if impl == "triton" or (impl == "auto" and chosen(gate_up_GY)):
        from glm5.kernels.swiglu.triton import swiglu_quantized as run

        return run(gate_up_GY, kind)
    if impl in ("auto", "reference"):
        out_GF = _reference(gate_up_GY)
        return out_GF, *quantize(out_GF, kind, impl="reference")
    raise unknown_impl("swiglu", impl, ("reference", "triton"))


def swiglu_backward(
    gate_up_GY: Tensor, grad_GF: Tensor, weight_G: Tensor, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows h = swiglu(gate_up) that count `weight_G` times, with `grad_GF` the gradient of a row that counts once:

    (gradient of gate_up [G, 2F], weight * h [G, F], gradient of the weight [G] float32 (float64 for float64)).
    """
    if impl == "triton" or (impl == "auto" and runs_on(gate_up_GY, grad_GF)):
        from glm5.kernels.swiglu.triton import swiglu_backward as run

        return run(gate_up_GY, grad_GF, weight_G)
    if impl in ("auto", "reference"):
        return _reference_backward(gate_up_GY, grad_GF, weight_G)
    raise unknown_impl("swiglu_backward", impl, ("reference", "triton"))
