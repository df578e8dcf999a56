"""token_quant in one pass, one program per row; and rows split in halves, as int4 products need (triton_codes.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.block_scaled import FP8
from glm5.kernels.quantized_weight import Act
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_rows import row_codes, row_scale
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def _prepare_rows(
    x_ptr,
    out_ptr,
    scale_ptr,
    D,
    half,
    stride,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """`half`: of D; given as it is, its divisibility is known, and stores are wide."""
    t = tl.program_id(0).to(tl.int64)
    d, i = tl.arange(0, WIDTH), tl.arange(0, WIDTH // 2)
    pdl_wait(PDL)
    x = tl.load(x_ptr + t * stride + d, mask=d < D, other=0.0)
    pdl_launch_dependents(PDL)
    scale = tl.full([1], 1.0, tl.float32)
    if KIND != "none":
        x = x.to(tl.float32)
        scale = row_scale(x, KIND)
        tl.store(scale_ptr + t + tl.arange(0, 1), scale)
    if HALVES:
        even, odd = tl.split(tl.reshape(x, [WIDTH // 2, 2]))
        tl.store(out_ptr + t * D + i, row_codes(even, scale, KIND), mask=i < half)
        tl.store(out_ptr + t * D + half + i, row_codes(odd, scale, KIND), mask=i < half)
    else:
        tl.store(out_ptr + t * D + d, row_codes(x, scale, KIND), mask=d < D)


def token_quant(x_TD: Tensor, kind: Act) -> tuple[Tensor, Tensor]:
    """As `reference.token_quant`."""
    codes, scale = prepare_rows(x_TD, kind, halves=False)
    assert scale is not None
    return codes, scale


def prepare_rows(x_TD: Tensor, kind: Act | None, *, halves: bool) -> tuple[Tensor, Tensor | None]:
    """(rows [T, D], scale [T] or None): quantized as `reference.token_quant` does, bit for bit, or as they are; in
    halves, or in order."""
    if x_TD.stride(-1) != 1:
        x_TD = x_TD.contiguous()
    if kind is None and not halves:
        return x_TD.contiguous(), None
    num_tokens, width = x_TD.shape
    dtype = {"int8": torch.int8, "fp8": FP8, None: x_TD.dtype}[kind]
    out = torch.empty(num_tokens, width, dtype=dtype, device=x_TD.device)
    scale = torch.empty(num_tokens if kind else 0, dtype=torch.float32, device=x_TD.device)
    block = triton.next_power_of_2(width)
    if num_tokens:
        _prepare_rows[(num_tokens,)](
            x_TD,
            out,
            scale,
            width,
            width // 2,
            x_TD.stride(0),
            KIND=kind or "none",
            HALVES=halves,
            WIDTH=block,
            num_warps=min(8, max(1, block // 512)),
            **dependent_launch(x_TD.device),
        )
    return out, scale if kind else None
