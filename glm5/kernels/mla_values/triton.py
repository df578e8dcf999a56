"""mla_values in one launch, optionally with FP8 codes: a program then computes 128 values of a head, with one scale."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.block_scaled import BLOCK, FP8
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait, prefetch, quotient, scale_of
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def _mla_values(
    x_ptr,
    w_ptr,
    out_ptr,
    fp8_ptr,
    scale_ptr,
    num_tokens,
    stride_b,
    H: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """program_id(0): blocks of BLOCK_V values of each head; (1): tile of tokens."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    h, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK_V
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    c, v = tl.arange(0, BLOCK_C), first + tl.arange(0, BLOCK_V)
    valid, inside = t < num_tokens, v < V
    w_ptr += h * C * V
    for start in tl.static_range(0, C, BLOCK_C):
        line = first + tl.arange(0, (BLOCK_V + 63) // 64) * 64
        prefetch(w_ptr + tl.minimum(start + c, C - 1)[:, None] * V + tl.minimum(line, V - 1)[None, :])
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    x_at = x_ptr + t[:, None] * (H * C) + h * C + c[None, :]
    w_at = w_ptr + c[:, None] * V + v[None, :]
    sums = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for start in tl.range(0, C, BLOCK_C, num_stages=4):
        here = start + c < C
        x = tl.load(x_at + start, mask=valid[:, None] & here[None, :], other=0.0)
        w = tl.load(w_at + start * V, mask=here[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    out = sums.to(out_ptr.dtype.element_ty)
    at = t[:, None] * (H * V) + h * V + v[None, :]
    tl.store(out_ptr + at, out, mask=valid[:, None] & inside[None, :])
    if QUANTIZE:
        value = out.to(tl.float32)
        scale, inverse = scale_of(tl.max(tl.abs(value), 1))
        wide, inverse = tl.broadcast_to(scale[:, None], value.shape), tl.broadcast_to(inverse[:, None], value.shape)
        tl.store(fp8_ptr + at, quotient(value, wide, inverse), mask=valid[:, None] & inside[None, :])
        tl.store(scale_ptr + t + (h * V + first) // 128 * stride_b, scale, mask=valid)


def mla_values(out_THC: Tensor, w_HCV: Tensor) -> Tensor:
    """[T, H * V]."""
    return _run(out_THC, w_HCV, quantize=False)[0]


def mla_values_quantized(out_THC: Tensor, w_HCV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H * V], and `act_quant` of it. Raises ValueError if a scale would cover values of two heads."""
    return _run(out_THC, w_HCV, quantize=True)


def _run(out_THC: Tensor, w_HCV: Tensor, *, quantize: bool) -> tuple[Tensor, Tensor, Tensor]:
    (num_tokens, H, C), V, device = out_THC.shape, w_HCV.shape[2], out_THC.device
    if quantize and V % BLOCK:
        raise ValueError(f"mla_values[triton] quantizes heads of a multiple of {BLOCK} values, got {V}")
    out = torch.empty(num_tokens, H * V, dtype=out_THC.dtype, device=device)
    fp8 = torch.empty(num_tokens if quantize else 0, H * V, dtype=FP8, device=device)
    scale = torch.empty(H * V // BLOCK, num_tokens if quantize else 0, dtype=torch.float32, device=device).T
    block_v = BLOCK if quantize else 32
    if num_tokens:
        _mla_values[(H * triton.cdiv(V, block_v), triton.cdiv(num_tokens, 16))](
            out_THC.contiguous(),
            w_HCV.contiguous(),
            out,
            fp8,
            scale,
            num_tokens,
            scale.stride(1),
            H=H,
            C=C,
            V=V,
            BLOCK_T=16,
            BLOCK_C=min(64, max(16, triton.next_power_of_2(C))),
            BLOCK_V=block_v,
            QUANTIZE=quantize,
            num_warps=4,
            **dependent_launch(device),
        )
    return out, fp8, scale
