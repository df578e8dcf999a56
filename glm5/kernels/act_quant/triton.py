"""act_quant in one pass: a program quantizes up to 16 groups of 128 values of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.block_scaled import BLOCK, FP8, num_blocks
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait, quantized_row
from glm5.kernels.triton_support import dependent_launch

_GROUPS = 16  # per program


@triton.jit
def _act_quant(x_ptr, out_ptr, scale_ptr, D, stride_x, stride_t, stride_b, GROUPS: tl.constexpr, PDL: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * GROUPS * 128 + tl.arange(0, GROUPS * 128)
    b = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    pdl_wait(PDL)
    x = tl.load(x_ptr + t * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    x_fp8, scale = quantized_row(x)
    tl.store(out_ptr + t * D + d, x_fp8, mask=d < D)
    tl.store(scale_ptr + t * stride_t + b * stride_b, scale, mask=b * 128 < D)


def act_quant(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.act_quant`, bit for bit. The scale is column-major, as linear layers read it."""
    if x_TD.stride(-1) != 1:
        x_TD = x_TD.contiguous()
    num_tokens, width = x_TD.shape
    x_fp8 = torch.empty(num_tokens, width, dtype=FP8, device=x_TD.device)
    scale = torch.empty(num_blocks(width), num_tokens, dtype=torch.float32, device=x_TD.device).T
    groups = min(_GROUPS, triton.next_power_of_2(num_blocks(width)))
    grid = (num_tokens, triton.cdiv(width, groups * BLOCK))
    if num_tokens:
        _act_quant[grid](
            x_TD,
            x_fp8,
            scale,
            width,
            x_TD.stride(0),
            *scale.stride(),
            GROUPS=groups,
            num_warps=max(1, groups // 4),
            **dependent_launch(x_TD.device),
        )
    return x_fp8, scale
