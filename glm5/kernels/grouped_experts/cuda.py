"""grouped_experts on Hopper from quantized rows, in CUDA C++ (experts.cu): one launch, or two where pairs are many.

A multiprocessor has one program, which does products and sums alike.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.kernels import cuda_code, triton_support
from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import BLOCK, FP8, BlockScaled
from glm5.kernels.grouped_experts.shared import SharedExpert

SOURCE = Path(__file__).with_name("experts.cu")
_THREADS, _PLAN_THREADS = 384, 1024  # as in experts.cu
_PITCH, _SLICE = 144, 256
_MOST_PAIRS = 2048  # that every program puts in order for itself
_COUNTERS = triton_support.NUM_ARRIVALS


class Cut(NamedTuple):
    """How work is cut: rows of a tile, blocks of weights under way, slices of outputs whose terms are in memory."""

    rows: int
    stages: int
    ring: int


def cut_for(num_tokens: int) -> Cut:
    """What was fastest on an H200 at GLM-5's sizes (docs/performance.md)."""
    return Cut(32, 5, 24) if num_tokens <= 256 else Cut(96, 4, 3)


def refusal(
    x_TD: Tensor, gate_up: Tensor | BlockScaled, down: Tensor | BlockScaled, shared: SharedExpert | None
) -> str:
    """Why these cannot be handled; empty if they can."""
    weights = [gate_up, down, *(shared or ())]
    if x_TD.dtype != torch.bfloat16 or not all(isinstance(weight, BlockScaled) for weight in weights):
        return f"needs rows in bfloat16 and BlockScaled weights, got {x_TD.dtype}"
    num_experts, width, inner = down[0].shape
    if width % _SLICE or inner % BLOCK or num_experts > _THREADS:
        got = list(down[0].shape)
        return f"needs widths of a multiple of {_SLICE} and {BLOCK} and at most {_THREADS} experts, got {got}"
    if not x_TD.is_cuda or torch.cuda.get_device_capability(x_TD.device)[0] != 9:
        return f"needs Hopper, got {x_TD.device}"
    return "" if cuda_code.can_build() else "needs NVRTC"


def grouped_experts(
    x_TD: Tensor,
    gate_up: Tensor | BlockScaled,
    down: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None = None,
    cut: Cut | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[T, D] in bfloat16. `quantized`: what `act_quant` makes of x, where that is known.

    Raises ValueError where `refusal` has a reason.
    """
    if reason := refusal(x_TD, gate_up, down, shared):
        raise ValueError(f"grouped_experts[cuda] {reason}; use impl='triton'")
    assert isinstance(gate_up, BlockScaled)
    assert isinstance(down, BlockScaled)
    (num_tokens, active), (num_experts, width, inner), device = expert_TA.shape, down.data.shape, x_TD.device
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out_TD
    cut = cut or cut_for(num_tokens)
    x_fp8, x_scale = quantized or act_quant(x_TD)
    expert_TA, rows = expert_TA.contiguous(), num_tokens * (active + 1)
    planned = room = None
    sizes = (active, width, inner, num_experts, cut.rows, cut.stages, shared is not None)
    if num_tokens * active > _MOST_PAIRS:
        room = num_experts + rows // cut.rows + 1
        planned = torch.empty(4 + 4 * room + num_tokens * active, dtype=torch.int32, device=device)
        _kernel("plan", *sizes, is_planned=True, device=device)(
            (1, 1), _PLAN_THREADS, expert_TA, planned, num_tokens, room
        )
    own = shared or SharedExpert(gate_up, gate_up, down)
    weights = (gate_up, down, *own)
    maps = [_map(weight.data) for weight in weights if isinstance(weight, BlockScaled)]
    scales = [weight.scale for weight in weights if isinstance(weight, BlockScaled)]
    ring = min(cut.ring, width // _SLICE)
    _kernel("experts", *sizes, is_planned=planned is not None, device=device)(
        (triton_support.multiprocessors(device), 1),
        _THREADS,
        x_fp8,
        x_scale.T.contiguous(),
        expert_TA,
        weight_TA.contiguous(),
        *maps,
        *scales,
        planned,
        torch.empty(rows, inner, dtype=FP8, device=device),
        torch.empty(inner // BLOCK, rows, dtype=torch.float32, device=device),
        torch.empty(ring, rows, _SLICE, dtype=x_TD.dtype, device=device),
        out_TD,
        triton_support.arrivals(device),
        num_tokens,
        room or 0,
        ring,
    )
    return out_TD


def _map(data: Tensor) -> cuda_code.TileMap:
    return cuda_code.tile_map(data.data_ptr(), data.numel() // data.shape[-1], data.shape[-1], BLOCK)


@cache
def _kernel(
    name: str,
    active: int,
    width: int,
    inner: int,
    num_experts: int,
    rows: int,
    stages: int,
    has_shared: bool,
    *,
    is_planned: bool,
    device: torch.device,
) -> cuda_code.CudaKernel:
    if name == "plan":
        shared_bytes = 4 * num_experts * (_PLAN_THREADS // 32 + 1)
    else:
        stage = -(-(256 * 128 + rows * 128 + 4 * (rows + 2)) // 1024) * 1024
        shared_bytes = 1024 + stages * (stage + 16) + 2 * rows * _PITCH + 10 * rows * 4 + 16
        most_tiles = num_experts + (_MOST_PAIRS + _MOST_PAIRS // active) // 32
        shared_bytes += 0 if is_planned else 16 * most_tiles + 4 * _MOST_PAIRS
    sizes = {"A": active, "D": width, "F": inner, "E": num_experts, "ROWS": rows, "STAGES": stages}
    kinds = {"SHARED": int(has_shared), "PLANNED": int(is_planned)}
    kernel = cuda_code.build(SOURCE, name, shared_bytes, device, **sizes, **kinds)
    assert kernel is not None
    return kernel
