"""rms_norm and its gradient, in one pass over the rows each.

n = x r    y = cast(n) w    dn = dy w    dx = r (dn - n mean(dn n))    dw = sum over rows of dy cast(n)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_PROGRAMS = 528  # that sum dw, each over its own rows in order, so the result is deterministic


@triton.jit
def _forward(x_ptr, weight_ptr, out_ptr, inverse_ptr, eps, D, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * D + d, mask=d < D, other=0.0)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    tl.store(out_ptr + t * D + d, (wide * inverse).to(x.dtype).to(tl.float32) * weight, mask=d < D)
    tl.store(inverse_ptr + t, inverse)


@triton.jit
def _backward(x_ptr, weight_ptr, inverse_ptr, grad_ptr, grad_x_ptr, grad_weight_ptr, num_rows, D, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        t = tl.full([], 0, tl.int64) + row
        x = tl.load(x_ptr + t * D + d, mask=d < D, other=0.0)
        grad = tl.load(grad_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + t)
        normed = x.to(tl.float32) * inverse
        grad_weight += grad * normed.to(x.dtype).to(tl.float32)
        grad *= weight
        mean = tl.sum(grad * normed, axis=0) / D
        tl.store(grad_x_ptr + t * D + d, (grad - normed * mean) * inverse, mask=d < D)
    tl.store(grad_weight_ptr + tl.program_id(0) * D + d, grad_weight, mask=d < D)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`."""
    return _RmsNorm.apply(x, weight, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        num_rows, width = x.numel() // x.shape[-1], x.shape[-1]
        out = torch.empty_like(x)
        inverse = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        if num_rows:
            _forward[(num_rows,)](x, weight, out, inverse, eps, width, **_blocks(width))
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, inverse = ctx.saved_tensors
        width, num_rows = x.shape[-1], len(inverse)
        num_programs = min(_PROGRAMS, max(1, num_rows))
        grad_x = torch.empty_like(x)
        parts = torch.empty(num_programs, width, dtype=torch.float32, device=x.device)
        args = (x, weight, inverse, grad.contiguous(), grad_x, parts, num_rows, width)
        _backward[(num_programs,)](*args, **_blocks(width))
        return grad_x, parts.sum(dim=0).to(weight.dtype), None


def _blocks(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}
