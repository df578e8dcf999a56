"""rms_norm in one pass over a row; `add_rms_norm` is the same with the sum of two rows, and with codes beside it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.block_scaled import BLOCK
from glm5.kernels.row_codes import Kind, empty_codes
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_rows import put_codes
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    codes_ptr,
    scale_ptr,
    eps,
    D,
    stride_x,
    stride_r,
    stride_b,
    BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    x = tl.load(x_ptr + t * stride_x + d, mask=d < D, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + t * stride_r + d, mask=d < D, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + t * D + d, x, mask=d < D)
    pdl_launch_dependents(PDL)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)).to(x.dtype)
    out = (normed.to(tl.float32) * weight).to(x.dtype)
    tl.store(out_ptr + t * D + d, out, mask=d < D)
    if QUANTIZE:
        put_codes(out, t, d, D, codes_ptr, scale_ptr, stride_b)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    return _run(rows, None, weight, eps, None)[0].view(x.shape)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `glm5.kernels.add_rms_norm`."""
    return _run(x_TD, residual_TD, weight_D, eps, None)[:2]


def add_rms_norm_quantized(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, kind: Kind
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, then codes of the norm and their scale."""
    return _run(x_TD, residual_TD, weight_D, eps, kind)


def _run(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, kind: Kind | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_TD = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
    add = residual_TD is not None
    residual_TD = x_TD if residual_TD is None else residual_TD
    residual_TD = residual_TD if residual_TD.stride(-1) == 1 else residual_TD.contiguous()
    num_rows, width = x_TD.shape
    device = x_TD.device
    out = torch.empty(num_rows, width, dtype=x_TD.dtype, device=device)
    total = torch.empty_like(out) if add else out
    codes, scale = empty_codes(num_rows, width, kind, device)
    if num_rows:
        block = max(BLOCK, triton.next_power_of_2(width))
        _rms_norm[(num_rows,)](
            x_TD,
            residual_TD,
            weight_D,
            out,
            total,
            codes,
            scale,
            eps,
            width,
            x_TD.stride(0),
            residual_TD.stride(0),
            scale.stride(-1),
            BLOCK_D=block,
            ADD=add,
            QUANTIZE=kind is not None,
            num_warps=min(16, max(1, block // 512)),
            **dependent_launch(device),
        )
    return out, total, codes, scale
