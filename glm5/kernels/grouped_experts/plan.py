"""Sorts (token, choice) pairs by expert and splits them into tiles: plan.cu on Hopper, triton_plan.py elsewhere."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.kernels import cuda_code
from glm5.kernels.triton_support import dependent_launch

SOURCE = Path(__file__).with_name("plan.cu")
_PROGRAMS, _THREADS = 8, 1024  # of plan.cu
MAX_EXPERTS = _THREADS
_CHUNK, _MANY_PAIRS = 128, 8192  # pairs of a Triton program, twice as many above _MANY_PAIRS


def tiles_by_expert(expert_TA: Tensor, num_experts: int, block_t: int) -> tuple[Tensor, Tensor]:
    """Pairs sorted by expert [T * A], and tiles (expert, first position, rows) [max_tiles + 1, 3]. Unused tiles have no
    rows; the last entry begins with the number of used ones."""
    if fits_cuda(expert_TA, num_experts):
        found = plan_on_hopper(expert_TA, num_experts, block_t, 0)
        return found.order, found.tiles
    return by_triton(expert_TA, num_experts, block_t)


def fits_cuda(expert_TA: Tensor, num_experts: int) -> bool:
    """Whether plan.cu supports this device, dtype and number of experts."""
    fits = num_experts <= MAX_EXPERTS and expert_TA.dtype == torch.int32
    return fits and not cuda_code.missing_on(expert_TA.device)


class Plan(NamedTuple):
    """The result of plan.cu: pairs sorted by expert, the position of each pair, tiles, and zeroed counters."""

    order: Tensor
    places: Tensor
    tiles: Tensor
    counters: Tensor


def plan_on_hopper(expert_TA: Tensor, num_experts: int, block_t: int, num_shared: int) -> Plan:
    """`tiles_by_expert` by plan.cu, with the position of each pair and counters: two, and one for each of these tiles
    and of `num_shared` tiles of the shared expert."""
    device, num_pairs, max_tiles = expert_TA.device, expert_TA.numel(), _max_tiles(expert_TA, num_experts, block_t)
    order, places = torch.empty(2, num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(max_tiles + 1, 3, dtype=torch.int32, device=device)
    counters = torch.empty(2 + num_shared + max_tiles, dtype=torch.int32, device=device)
    given = expert_TA.contiguous(), order, places, tiles, counters, num_pairs, max_tiles, len(counters)
    _kernel(num_experts, block_t, device)((_PROGRAMS, 1), _THREADS, *given, cluster=_PROGRAMS)
    return Plan(order, places, tiles, counters)


def by_triton(expert_TA: Tensor, num_experts: int, block_t: int) -> tuple[Tensor, Tensor]:
    """`tiles_by_expert` in two kernels."""
    from glm5.kernels.grouped_experts import triton_plan

    device, num_pairs, max_tiles = expert_TA.device, expert_TA.numel(), _max_tiles(expert_TA, num_experts, block_t)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(max_tiles + 1, 3, dtype=torch.int32, device=device)
    chunk = _CHUNK if num_pairs <= _MANY_PAIRS else 2 * _CHUNK
    chunks, experts = -(-num_pairs // chunk), 1 << num_experts.bit_length()
    counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
    ranks = torch.empty_like(order)
    sizes = {"EXPERTS": experts, "CHUNK": chunk, "num_warps": 8, **dependent_launch(device)}
    triton_plan.count[(chunks,)](expert_TA, counts, ranks, num_pairs, **sizes)
    triton_plan.plan[(chunks,)](
        expert_TA, counts, ranks, order, tiles, num_pairs, chunks, max_tiles, E=num_experts, BLOCK_T=block_t, **sizes
    )
    return order, tiles


def _max_tiles(expert_TA: Tensor, num_experts: int, block_t: int) -> int:
    return min(expert_TA.numel(), num_experts + expert_TA.numel() // block_t)


@cache
def _kernel(num_experts: int, block_t: int, device: torch.device) -> cuda_code.CudaKernel:
    shared_bytes = 4 * (_THREADS // 32 * (num_experts + 2) + num_experts)
    sizes = {"E": num_experts, "ROWS": block_t, "PROGRAMS": _PROGRAMS}
    return cuda_code.build(SOURCE, "plan", shared_bytes, device, **sizes)
