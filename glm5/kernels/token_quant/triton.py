"""token_quant in one pass, a program a row; and rows in halves, as int4 codes meet them (triton_codes.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.block_scaled import FP8
from glm5.kernels.coded import Act
from glm5.kernels.triton_fp8 import let_later_begin, quotient, wait_for_earlier
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def _prepare_rows(
    x_ptr,
    out_ptr,
    scale_ptr,
    D,
    stride,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    wait_for_earlier(PDL)
    x = tl.load(x_ptr + t * stride + d, mask=d < D, other=0.0)
    let_later_begin(PDL)
    place = (d % 2) * (D // 2) + d // 2 if HALVES else d
    at = out_ptr + t * D + place
    if KIND == "none":
        tl.store(at, x, mask=d < D)
    else:
        x = x.to(tl.float32)
        highest = tl.full([1], 448.0 if KIND == "fp8" else 127.0, tl.float32)
        amax = tl.zeros([1], tl.float32) + tl.max(tl.abs(x), 0)
        scale = tl.div_rn(amax, highest)
        scale = tl.where(scale == 0, 1.0, scale)
        tl.store(scale_ptr + t + tl.arange(0, 1), scale)
        if KIND == "fp8":
            inverse = tl.div_rn(tl.full([1], 1.0, tl.float32), scale)
            wide, inverse = tl.broadcast_to(scale, [WIDTH]), tl.broadcast_to(inverse, [WIDTH])
            tl.store(at, quotient(x, wide, inverse), mask=d < D)
        else:
            near = tl.div_rn(x, tl.broadcast_to(scale, [WIDTH]))
            # Adding 1.5 * 2^23 rounds to nearest even.
            near = tl.clamp((near + 12582912.0) - 12582912.0, -127.0, 127.0)
            tl.store(at, near.to(tl.int8), mask=d < D)


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
    if num_tokens:
        _prepare_rows[(num_tokens,)](
            x_TD,
            out,
            scale,
            width,
            x_TD.stride(0),
            KIND=kind or "none",
            HALVES=halves,
            WIDTH=triton.next_power_of_2(width),
            num_warps=min(8, max(1, triton.cdiv(width, 512))),
            **dependent_launch(x_TD.device),
        )
    return out, scale if kind else None
