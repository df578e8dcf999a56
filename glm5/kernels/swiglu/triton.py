"""swiglu, with codes beside it if wanted, and its gradient, in one pass over a row each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.row_codes import Kind, empty_codes
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_rows import put_codes
from glm5.kernels.triton_support import dependent_launch

_BLOCK = 2048


@triton.jit
def _forward(gate_up_ptr, out_ptr, F, BLOCK: tl.constexpr):
    g = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + g * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + g * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out_ptr + g * F + f, gate * tl.sigmoid(gate) * up, mask=f < F)


@triton.jit
def _swiglu_quantized(gate_up_ptr, out_ptr, codes_ptr, scale_ptr, F, stride_b, BLOCK: tl.constexpr, PDL: tl.constexpr):
    g = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK)
    pdl_wait(PDL)
    gate = tl.load(gate_up_ptr + g * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + g * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    out = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + g * F + f, out, mask=f < F)
    put_codes(out, g, f, F, codes_ptr, scale_ptr, stride_b)


@triton.jit
def _backward(gate_up_ptr, grad_ptr, weight_ptr, grad_up_ptr, hidden_ptr, grad_weight_ptr, F, BLOCK: tl.constexpr):
    g = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + g).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, F, BLOCK):
        f = first + tl.arange(0, BLOCK)
        gate = tl.load(gate_up_ptr + g * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + g * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + g * F + f, mask=f < F, other=0.0).to(tl.float32)
        opened = tl.sigmoid(gate)
        hidden = gate * opened * up
        total += grad * hidden
        grad *= weight
        tl.store(hidden_ptr + g * F + f, weight * hidden, mask=f < F)
        tl.store(grad_up_ptr + g * 2 * F + f, grad * up * opened * (1 + gate * (1 - opened)), mask=f < F)
        tl.store(grad_up_ptr + g * 2 * F + F + f, grad * gate * opened, mask=f < F)
    tl.store(grad_weight_ptr + g, tl.sum(total, axis=0))


def swiglu(gate_up_GY: Tensor) -> Tensor:
    """As `reference.swiglu`."""
    gate_up_GY = gate_up_GY.contiguous()
    num_rows, width = gate_up_GY.shape[0], gate_up_GY.shape[1] // 2
    out_GF = gate_up_GY.new_empty(num_rows, width)
    block = min(_BLOCK, triton.next_power_of_2(width))
    if num_rows:
        _forward[(num_rows, triton.cdiv(width, block))](gate_up_GY, out_GF, width, BLOCK=block, num_warps=_warps(block))
    return out_GF


def swiglu_quantized(gate_up_GY: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """The same, then codes of it and their scale."""
    gate_up_GY = gate_up_GY.contiguous()
    num_rows, width = gate_up_GY.shape[0], gate_up_GY.shape[1] // 2
    out_GF = gate_up_GY.new_empty(num_rows, width)
    codes, scale = empty_codes(num_rows, width, kind, out_GF.device)
    block = max(128, triton.next_power_of_2(width))
    if num_rows:
        _swiglu_quantized[(num_rows,)](
            gate_up_GY,
            out_GF,
            codes,
            scale,
            width,
            scale.stride(-1),
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **dependent_launch(out_GF.device),
        )
    return out_GF, codes, scale


def swiglu_backward(gate_up_GY: Tensor, grad_GF: Tensor, weight_G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.swiglu_backward`."""
    gate_up_GY, grad_GF = gate_up_GY.contiguous(), grad_GF.contiguous()
    num_rows, width = grad_GF.shape
    grad_up_GY, hidden_GF = torch.empty_like(gate_up_GY), torch.empty_like(grad_GF)
    grad_weight_G = torch.empty(num_rows, dtype=torch.float32, device=grad_GF.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    if num_rows:
        results = (grad_up_GY, hidden_GF, grad_weight_G)
        _backward[(num_rows,)](
            gate_up_GY, grad_GF, weight_G.contiguous(), *results, width, BLOCK=block, num_warps=_warps(block)
        )
    return grad_up_GY, hidden_GF, grad_weight_G


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
