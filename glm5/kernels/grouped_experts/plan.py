"""Which rows share an expert: in CUDA C++ on Hopper (plan.cu), by Triton elsewhere (triton_plan.py)."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.kernels import cuda_code
from glm5.kernels.triton_support import dependent_launch

SOURCE = Path(__file__).with_name("plan.cu")
_PROGRAMS, _THREADS = 8, 1024  # of plan.cu
MOST_EXPERTS = _THREADS
_CHUNK, _MANY_PAIRS = 128, 8192  # pairs that one program of Triton's places; twice as many where there are more


def tiles_by_expert(expert_TA: Tensor, num_experts: int, block_t: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts [T * A], and as many tiles [.., 3] as there may have to be, those left over
    without rows; the last row begins with how many there are."""
    if is_there(expert_TA, num_experts):
        found = planned(expert_TA, num_experts, block_t, 0)
        return found.order, found.tiles
    return by_triton(expert_TA, num_experts, block_t)


def is_there(expert_TA: Tensor, num_experts: int) -> bool:
    """Whether plan.cu runs where these are."""
    fits = num_experts <= MOST_EXPERTS and expert_TA.dtype == torch.int32
    return fits and not cuda_code.missing_on(expert_TA.device)


class Plan(NamedTuple):
    """`counters`: zeros."""

    order: Tensor
    places: Tensor
    tiles: Tensor
    counters: Tensor


def planned(expert_TA: Tensor, num_experts: int, block_t: int, num_shared: int) -> Plan:
    """What `tiles_by_expert` finds, by plan.cu; where in the order each pair is; two counters, and one for each of
    `num_shared` other tiles and of these."""
    device, num_pairs, room = expert_TA.device, expert_TA.numel(), _room(expert_TA, num_experts, block_t)
    order, places = torch.empty(2, num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(room + 1, 3, dtype=torch.int32, device=device)
    counters = torch.empty(2 + num_shared + room, dtype=torch.int32, device=device)
    given = expert_TA.contiguous(), order, places, tiles, counters, num_pairs, room, len(counters)
    _kernel(num_experts, block_t, device)((_PROGRAMS, 1), _THREADS, *given, cluster=_PROGRAMS)
    return Plan(order, places, tiles, counters)


def by_triton(expert_TA: Tensor, num_experts: int, block_t: int) -> tuple[Tensor, Tensor]:
    """`tiles_by_expert` in two kernels."""
    from glm5.kernels.grouped_experts import triton_plan

    device, num_pairs, room = expert_TA.device, expert_TA.numel(), _room(expert_TA, num_experts, block_t)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(room + 1, 3, dtype=torch.int32, device=device)
    chunk = _CHUNK if num_pairs <= _MANY_PAIRS else 2 * _CHUNK
    chunks, experts = -(-num_pairs // chunk), 1 << num_experts.bit_length()
    counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
    ranks = torch.empty_like(order)
    sizes = {"EXPERTS": experts, "CHUNK": chunk, "num_warps": 8, **dependent_launch(device)}
    triton_plan.count[(chunks,)](expert_TA, counts, ranks, num_pairs, **sizes)
    triton_plan.plan[(chunks,)](
        expert_TA, counts, ranks, order, tiles, num_pairs, chunks, room, E=num_experts, BLOCK_T=block_t, **sizes
    )
    return order, tiles


def _room(expert_TA: Tensor, num_experts: int, block_t: int) -> int:
    return min(expert_TA.numel(), num_experts + expert_TA.numel() // block_t)


@cache
def _kernel(num_experts: int, block_t: int, device: torch.device) -> cuda_code.CudaKernel:
    shared_bytes = 4 * (_THREADS // 32 * (num_experts + 2) + num_experts)
    sizes = {"E": num_experts, "ROWS": block_t, "PROGRAMS": _PROGRAMS}
    kernel = cuda_code.build(SOURCE, "plan", shared_bytes, device, **sizes)
    assert kernel is not None
    return kernel
