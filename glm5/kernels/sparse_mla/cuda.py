"""sparse_mla on Hopper for a step's queries, in CUDA C++ (attend.cu): 8 or 16 heads, latents in bfloat16 or FP8.

A multiprocessor has one program. Where keys are shared out, Triton's kernel merges the shares, in order.
"""

import math
import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels import cuda_code, triton_support
from glm5.kernels.fp8_pool import Fp8Latents, Pool

SOURCE = Path(__file__).with_name("attend.cu")
KEYS, _WARPS = 64, 12  # as in attend.cu
_STAGES, _FP8_STAGES = 2, 4
_START = 1.5  # what a program costs beside its blocks, in blocks


def refusal(q_THL: Tensor, latent_PZL: Pool, keys_TK: Tensor | None, page_table_BN: Tensor, value_dim: int) -> str:
    """Why these cannot be handled; empty if they can."""
    num_heads, width = q_THL.shape[1:]
    row_PZX = latent_PZL.row if isinstance(latent_PZL, Fp8Latents) else latent_PZL
    if not isinstance(row_PZX, Tensor) or {q_THL.dtype, row_PZX.dtype} - {torch.uint8} != {torch.bfloat16}:
        return "needs queries in bfloat16, and latents in bfloat16 or FP8"
    least = 128 if row_PZX.dtype == torch.bfloat16 else 512
    if num_heads not in (8, 16) or value_dim % least or width % 64 or width > 640:
        got = f"{num_heads}, {value_dim}, {width}"
        return f"needs 8 or 16 heads, values of a multiple of {least}, widths of 64, got {got}"
    if keys_TK is None and len(q_THL) > len(page_table_BN):
        return "is for a query of each request where every key is read"
    steps = [step * row_PZX.element_size() for step in row_PZX.stride()]
    if row_PZX.stride(2) != 1 or row_PZX.data_ptr() % 16 or any(step % 16 for step in steps[:2]):
        return f"needs rows at multiples of 16 bytes, got strides {row_PZX.stride()}"
    if not q_THL.is_cuda or torch.cuda.get_device_capability(q_THL.device)[0] != 9:
        return f"needs Hopper, got {q_THL.device}"
    return "" if cuda_code.can_build() else "needs NVRTC"


def sparse_mla(
    q_THL: Tensor,
    latent_PZL: Pool,
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """As `reference.sparse_mla`, without a gradient. Raises ValueError where `refusal` has a reason."""
    from glm5.kernels.sparse_mla.triton import merge

    if reason := refusal(q_THL, latent_PZL, keys_TK, page_table_BN, value_dim):
        raise ValueError(f"sparse_mla[cuda] {reason}; use impl='triton'")
    row_PZX = latent_PZL.row if isinstance(latent_PZL, Fp8Latents) else latent_PZL
    assert isinstance(row_PZX, Tensor)
    (num_queries, num_heads, width), page_size, device = q_THL.shape, latent_PZL.shape[1], q_THL.device
    num_keys = page_table_BN.shape[1] * page_size if keys_TK is None else keys_TK.shape[1]
    out_THC = q_THL.new_empty(num_queries, num_heads, value_dim)
    lse_TH = q_THL.new_empty(num_queries, num_heads, dtype=torch.float32)
    if num_queries == 0:
        return out_THC, lse_TH
    shares = num_shares(num_queries, num_keys, triton_support.multiprocessors(device))
    part, part_lse = out_THC, lse_TH
    if shares > 1:
        part = q_THL.new_empty(num_queries, shares, num_heads, value_dim, dtype=torch.float32)
        part_lse = q_THL.new_empty(num_queries, shares, num_heads, dtype=torch.float32)
    page_step, row_step, _ = (step * row_PZX.element_size() for step in row_PZX.stride())
    (factor,) = struct.unpack("i", struct.pack("f", scale * math.log2(math.e)))
    _kernel(num_heads, value_dim, width, page_size, row_PZX.dtype == torch.uint8, device)(
        (shares, num_queries),
        32 * _WARPS,
        q_THL.contiguous(),
        None if keys_TK is None else keys_TK.contiguous(),
        row_PZX,
        page_table_BN.contiguous(),
        row_T,
        end_T,
        part,
        part_lse,
        page_table_BN.shape[1],
        num_keys,
        page_step,
        row_step,
        factor,
    )
    if shares > 1:
        merge(part, part_lse, out_THC, lse_TH, triton_support.dependent_launch(device))
    return out_THC, lse_TH


def num_shares(num_queries: int, num_keys: int, num_programs: int) -> int:
    """Into how many pieces a query's keys are cut, so that programs, of which so many run at once, end soonest."""
    blocks = max(1, -(-num_keys // KEYS))
    return min(
        range(1, min(blocks, num_programs) + 1),
        key=lambda shares: -(-num_queries * shares // num_programs) * (-(-blocks // shares) + _START),
    )


@cache
def _kernel(
    num_heads: int, value_dim: int, width: int, page_size: int, is_fp8: bool, device: torch.device
) -> cuda_code.CudaKernel:
    stages = _FP8_STAGES if is_fp8 else _STAGES
    row = value_dim + value_dim // 32 + 2 * (width - value_dim) if is_fp8 else 2 * width
    pitch = row + (0 if row // 16 % 2 else 16)
    shared_bytes = KEYS * (stages * pitch + 2 * 2 * 4 * (num_heads + 4))
    sizes = {"H": num_heads, "C": value_dim, "R": width - value_dim, "Z": page_size}
    kinds = {"FP8": int(is_fp8), "STAGES": stages}
    kernel = cuda_code.build(SOURCE, "attend", shared_bytes, device, **sizes, **kinds)
    assert kernel is not None
    return kernel
