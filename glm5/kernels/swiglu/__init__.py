"""SwiGLU of MLPs and experts, and its gradient with a weight for each row."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.row_codes import Kind

TABLE = Table(__name__, triton=Impl("one pass", on="triton"), reference=Impl("the definition"))


def swiglu(gate_up_GY: Tensor, *, impl: str = "auto") -> Tensor:
    """silu(gate) * up of rows [G, 2F], gates first: [G, F] in their dtype. No gradient: see `swiglu_backward`."""
    return TABLE.module(impl, gate_up_GY).swiglu(gate_up_GY)


def swiglu_quantized(gate_up_GY: Tensor, kind: Kind, *, impl: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """(out [G, F], codes, scale): `swiglu`, and `row_codes.quantize` of it, for the product that reads it."""
    return TABLE.module(impl, gate_up_GY).swiglu_quantized(gate_up_GY, kind)


def swiglu_backward(
    gate_up_GY: Tensor, grad_GF: Tensor, weight_G: Tensor, *, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows h = swiglu(gate_up) that count `weight_G` times, with `grad_GF` the gradient of a row that counts once:

    (gradient of gate_up [G, 2F], weight * h [G, F], gradient of the weight [G] float32 (float64 for float64)).
    """
    return TABLE.module(impl, gate_up_GY).swiglu_backward(gate_up_GY, grad_GF, weight_G)
