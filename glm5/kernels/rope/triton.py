"""rope in one pass, rounded to x's dtype where the reference rounds."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def _rope(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    H,
    stride_t,
    stride_h,
    out_stride_t,
    out_stride_h,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    r = tl.arange(0, 2 * PAIRS)
    j = tl.arange(0, PAIRS)
    inside = (h < H)[:, None] & (r < 2 * HALF)[None, :]
    pdl_wait(PDL)
    x = tl.load(x_ptr + t * stride_t + h[:, None] * stride_h + r[None, :], mask=inside, other=0.0)
    cos = tl.load(cos_ptr + t * HALF + j, mask=j < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + t * HALF + j, mask=j < HALF, other=0.0).to(tl.float32)[None, :]
    pdl_launch_dependents(PDL)
    a, b = tl.split(tl.reshape(x.to(tl.float32), [BLOCK_H, PAIRS, 2]))
    first = (a * cos).to(x.dtype).to(tl.float32) - (b * sin).to(x.dtype).to(tl.float32)
    second = (b * cos).to(x.dtype).to(tl.float32) + (a * sin).to(x.dtype).to(tl.float32)
    out = tl.reshape(tl.join(first, second), [BLOCK_H, 2 * PAIRS]).to(x.dtype)
    tl.store(out_ptr + t * out_stride_t + h[:, None] * out_stride_h + r[None, :], out, mask=inside)


def rope(x: Tensor, cos_TR2: Tensor, sin_TR2: Tensor, _cis_TR2: Tensor | None = None) -> Tensor:
    """As `reference.rope`; x may be strided."""
    asks = torch.is_grad_enabled() and x.requires_grad
    return _Rope.apply(x, cos_TR2, sin_TR2) if asks else rotate(x, cos_TR2, sin_TR2)


def rotate(x: Tensor, cos_TR2: Tensor, sin_TR2: Tensor, out: Tensor | None = None) -> Tensor:
    """The same without a gradient; x may be strided. `out`: room for the result, of rows in one piece; it may be x."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    rows = x if x.dim() == 3 else x.unsqueeze(1)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    num_tokens, heads, width = rows.shape
    places = out if out.dim() == 3 else out.unsqueeze(1)
    block_h = min(8, triton.next_power_of_2(heads))
    if num_tokens:
        _rope[(num_tokens, triton.cdiv(heads, block_h))](
            rows,
            cos_TR2.contiguous(),
            sin_TR2.contiguous(),
            places,
            heads,
            *rows.stride()[:2],
            *places.stride()[:2],
            HALF=width // 2,
            PAIRS=triton.next_power_of_2(width // 2),
            BLOCK_H=block_h,
            num_warps=1,
            enable_fp_fusion=False,  # would skip a rounding
            **dependent_launch(x.device),
        )
    return out


class _Rope(torch.autograd.Function):
    """Backward rotates the other way."""

    @staticmethod
    def forward(ctx, x: Tensor, cos_TR2: Tensor, sin_TR2: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TR2, sin_TR2)
        return rotate(x, cos_TR2, sin_TR2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        cos_TR2, sin_TR2 = ctx.saved_tensors
        return rotate(grad, cos_TR2, -sin_TR2), None, None
