"""sparse_mla on Hopper for a step's queries, in CUDA C++ (attend.cu): 8 or 16 heads, latents in bfloat16.

A multiprocessor has one program. Where keys are shared out, Triton's kernel merges the shares, in order.
"""

import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels import cuda_code, triton_support
from glm5.kernels.fp8_pool import Pool

KEYS, _STAGES, _WARPS = 64, 2, 12  # as in attend.cu
_START = 1.5  # what a program costs beside its blocks, in blocks


def refusal(q_THL: Tensor, latent_PZL: Pool, keys_TK: Tensor | None, page_table_BN: Tensor, value_dim: int) -> str:
    """Why these cannot be handled; empty if they can."""
    num_heads, width = q_THL.shape[1:]
    if not isinstance(latent_PZL, Tensor) or {q_THL.dtype, latent_PZL.dtype} != {torch.bfloat16}:
        return "needs queries and latents in bfloat16"
    if num_heads not in (8, 16) or value_dim % 128 or width % 64 or width > 640:
        return f"needs 8 or 16 heads, values of a multiple of 128, widths of 64, got {num_heads}, {value_dim}, {width}"
    if keys_TK is None and len(q_THL) > len(page_table_BN):
        return "is for a query of each request where every key is read"
    if latent_PZL.stride(2) != 1 or latent_PZL.data_ptr() % 16 or any(step % 8 for step in latent_PZL.stride()[:2]):
        return f"needs rows at multiples of 16 bytes, got strides {latent_PZL.stride()}"
    if not q_THL.is_cuda or torch.cuda.get_device_capability(q_THL.device)[0] != 9:
        return f"needs Hopper, got {q_THL.device}"
    return "" if _kernel(num_heads, value_dim, width, latent_PZL.shape[1], q_THL.device) else "needs NVRTC"


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
    assert isinstance(latent_PZL, Tensor)
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
    kernel = _kernel(num_heads, value_dim, width, page_size, device)
    assert kernel is not None
    kernel(
        (shares, num_queries),
        32 * _WARPS,
        q_THL.contiguous(),
        None if keys_TK is None else keys_TK.contiguous(),
        latent_PZL,
        page_table_BN.contiguous(),
        row_T,
        end_T,
        part,
        part_lse,
        page_table_BN.shape[1],
        num_keys,
        latent_PZL.stride(0),
        latent_PZL.stride(1),
        scale * math.log2(math.e),
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
    num_heads: int, value_dim: int, width: int, page_size: int, device: torch.device
) -> cuda_code.CudaKernel | None:
    shared_bytes = KEYS * (_STAGES * (2 * width + 16) + 2 * 2 * 4 * (num_heads + 4))
    sizes = {"H": num_heads, "C": value_dim, "R": width - value_dim, "Z": page_size}
    return cuda_code.build(Path(__file__).with_name("attend.cu"), "attend", shared_bytes, device, **sizes)
