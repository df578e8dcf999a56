"""silu(gate) * up, and its gradient.

    h = g s(g) u        dg = w dh u s(g) (1 + g (1 - s(g)))        du = w dh g s(g)        dw = sum over F of dh h

with s the logistic function. Inside float32 (float64 for float64); results are rounded once to the rows' dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.row_codes import Kind, quantize


def swiglu(gate_up_GY: Tensor) -> Tensor:
    """[G, F]."""
    gate_GF, up_GF = _wide(gate_up_GY).chunk(2, dim=-1)
    return (F.silu(gate_GF) * up_GF).to(gate_up_GY.dtype)


def swiglu_quantized(gate_up_GY: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """(out [G, F], codes, scale)."""
    out_GF = swiglu(gate_up_GY)
    return out_GF, *quantize(out_GF, kind, impl="reference")


def swiglu_backward(gate_up_GY: Tensor, grad_GF: Tensor, weight_G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate_up, weighted h, gradient of the weight)."""
    gate_GF, up_GF = _wide(gate_up_GY).chunk(2, dim=-1)
    grad_GF, weight_G1 = _wide(grad_GF), weight_G.to(gate_GF.dtype).unsqueeze(1)
    open_GF = gate_GF.sigmoid()
    silu_GF = gate_GF * open_GF
    weighted_GF = weight_G1 * grad_GF
    grad_gate_GF = weighted_GF * up_GF * open_GF * (1 + gate_GF * (1 - open_GF))
    grad_up_GY = torch.cat([grad_gate_GF, weighted_GF * silu_GF], dim=-1)
    hidden_GF = silu_GF * up_GF
    dtype = gate_up_GY.dtype
    return grad_up_GY.to(dtype), (weight_G1 * hidden_GF).to(dtype), (grad_GF * hidden_GF).sum(dim=-1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
