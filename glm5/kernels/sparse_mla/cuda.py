"""sparse_mla of decoding on Hopper, in CUDA C++: 8 or 16 heads, one program per multiprocessor.

attend.cu       latents in bfloat16. With split keys, Triton's kernel merges the splits, in order
attend_fp8.cu   FP8 latents. Programs that split a query's keys form a cluster, and merge their results
"""

import math
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels import cuda_code, triton_support
from glm5.kernels.fp8_pool import Fp8Latents, Pool

SOURCE, FP8_SOURCE = (Path(__file__).with_name(name) for name in ("attend.cu", "attend_fp8.cu"))
KEYS, _THREADS = 64, 384  # as in both
_STAGES, _FP8_STAGES = 2, 4
_START = 1.5  # overhead of a program, in blocks of keys
_MAX_SHARES = 16  # of a cluster


def refusal(q_THL: Tensor, latent_PZL: Pool, keys_TK: Tensor | None, page_table_BN: Tensor, value_dim: int) -> str:
    """Why these cannot be handled; empty if they can."""
    num_heads, width = q_THL.shape[1:]
    row_PZX = latent_PZL.row if isinstance(latent_PZL, Fp8Latents) else latent_PZL
    if not isinstance(row_PZX, Tensor) or {q_THL.dtype, row_PZX.dtype} - {torch.uint8} != {torch.bfloat16}:
        return "needs queries in bfloat16, and latents in bfloat16 or FP8"
    got = f"got {num_heads}, {value_dim}, {width}"
    if row_PZX.dtype == torch.uint8 and (num_heads not in (8, 16) or (value_dim, width) != (512, 576)):
        return f"needs 8 or 16 heads, values of 512 and widths of 576 over FP8, {got}"
    if num_heads not in (8, 16) or value_dim % 128 or width % 64 or width > 640:
        return f"needs 8 or 16 heads, values of a multiple of 128, widths of 64, {got}"
    if keys_TK is None and len(q_THL) > len(page_table_BN):
        return "is for a query of each request where every key is read"
    steps = [step * row_PZX.element_size() for step in row_PZX.stride()]
    if row_PZX.stride(2) != 1 or row_PZX.data_ptr() % 16 or any(step % 16 for step in steps[:2]):
        return f"needs rows at multiples of 16 bytes, got strides {row_PZX.stride()}"
    return cuda_code.missing_on(q_THL.device)


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
    page_step, row_step, _ = (step * row_PZX.element_size() for step in row_PZX.stride())
    (factor,) = struct.unpack("i", struct.pack("f", scale * math.log2(math.e)))
    keys_TK = None if keys_TK is None else keys_TK.contiguous()
    given = q_THL.contiguous(), keys_TK, row_PZX, page_table_BN.contiguous(), row_T, end_T
    sizes = page_table_BN.shape[1], num_keys, page_step, row_step, factor
    if row_PZX.dtype == torch.uint8:
        kernel, at_once = _fp8_kernel(num_heads, page_size, device)
        shares = num_shares(num_queries, num_keys, lambda shares: at_once[shares - 1], len(at_once))
        kernel((shares, num_queries), _THREADS, *given, out_THC, lse_TH, *sizes, cluster=shares)
        return out_THC, lse_TH
    multiprocessors = triton_support.multiprocessors(device)
    shares = num_shares(num_queries, num_keys, lambda shares: multiprocessors // shares, multiprocessors)
    part, part_lse = out_THC, lse_TH
    if shares > 1:
        part = q_THL.new_empty(num_queries, shares, num_heads, value_dim, dtype=torch.float32)
        part_lse = q_THL.new_empty(num_queries, shares, num_heads, dtype=torch.float32)
    kernel = _kernel(num_heads, value_dim, width, page_size, device)
    kernel((shares, num_queries), _THREADS, *given, part, part_lse, *sizes)
    if shares > 1:
        from glm5.kernels.sparse_mla.triton import merge

        merge(part, part_lse, out_THC, lse_TH, triton_support.dependent_launch(device))
    return out_THC, lse_TH


def num_shares(num_queries: int, num_keys: int, at_once: Callable[[int], int], most: int) -> int:
    """The number of splits of a query's keys with the shortest estimated time.

    `at_once`: the number of queries that run concurrently with a number of splits.
    """
    blocks = max(1, -(-num_keys // KEYS))
    return min(
        (shares for shares in range(1, min(blocks, most) + 1) if at_once(shares)),
        key=lambda shares: -(-num_queries // at_once(shares)) * (-(-blocks // shares) + _START),
    )


@cache
def _kernel(num_heads: int, value_dim: int, width: int, page_size: int, device: torch.device) -> cuda_code.CudaKernel:
    pitch = 2 * width + (0 if width // 8 % 2 else 16)
    shared_bytes = KEYS * (_STAGES * pitch + 2 * 2 * 4 * (num_heads + 4))
    sizes = {"H": num_heads, "C": value_dim, "R": width - value_dim, "Z": page_size, "STAGES": _STAGES}
    return cuda_code.build(SOURCE, "attend", shared_bytes, device, **sizes)


@cache
def _fp8_kernel(num_heads: int, page_size: int, device: torch.device) -> tuple[cuda_code.CudaKernel, list[int]]:
    """The kernel, and how many clusters of 1, 2, .. programs run concurrently."""
    storage_bytes = _storage_bytes(num_heads, _FP8_STAGES)
    shared_bytes = 1023 + _FP8_STAGES * KEYS * (512 + 2 * 64 + 4 * 4) + storage_bytes
    sizes = {"H": num_heads, "Z": page_size, "STAGES": _FP8_STAGES, "SHARED_STORAGE": storage_bytes}
    kernel = cuda_code.build(FP8_SOURCE, "attend_fp8", shared_bytes, device, **sizes)
    alone = triton_support.multiprocessors(device)
    return kernel, [alone, *(kernel.num_clusters(_THREADS, shares) for shares in range(2, _MAX_SHARES + 1))]


def _storage_bytes(num_heads: int, stages: int) -> int:
    """Shared memory of attend_fp8.cu without its stages."""
    a_head = 4 * 2 * 128 + 2 * 4 * 2 * KEYS + 2 * 16 + 2 * 16 * 4 + 2 * 8 * 4 + 4
    return num_heads * a_head + stages * (4 * KEYS + 2 * 8)
