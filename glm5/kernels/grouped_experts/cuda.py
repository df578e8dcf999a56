"""grouped_experts of many tokens on Hopper, in CUDA C++ (rows.cu): the two products. What finds tiles of rows and adds
up a token's terms is Triton's."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels import cuda_code, triton_support
from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import BLOCK, FP8, BlockScaled
from glm5.kernels.grouped_experts.shared import SharedExpert
from glm5.kernels.grouped_experts.terms import Terms

SOURCE = Path(__file__).with_name("rows.cu")
ROWS, _THREADS, _SLICE = 96, 384, 256  # as in rows.cu
_PITCHES = {"up": 144, "down": 2 * 272}
_STAGES = {"up": 4, "down": 3}  # blocks of weights under way, as many as there is room for


def is_faster(num_pairs: int, num_experts: int, inner: int) -> bool:
    """Than Triton's, on an H200 at GLM-5's sizes (docs/performance.md): where most experts' rows are one tile, and
    narrow ones have many."""
    least = 16 if inner >= 512 else 48
    return least * num_experts <= num_pairs <= 80 * num_experts


def refusal(
    x_TD: Tensor, gate_up: Tensor | BlockScaled, down: Tensor | BlockScaled, shared: SharedExpert | None
) -> str:
    """Why these cannot be handled; empty if they can."""
    weights = [gate_up, down, *(shared or ())]
    if x_TD.dtype != torch.bfloat16 or not all(isinstance(weight, BlockScaled) for weight in weights):
        return f"needs rows in bfloat16 and BlockScaled weights, got {x_TD.dtype}"
    width, inner = down[0].shape[1:]
    if width % _SLICE or inner % BLOCK:
        return f"needs widths of a multiple of {_SLICE} and {BLOCK}, got {list(down[0].shape)}"
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
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[T, D] in bfloat16. `quantized`: what `act_quant` makes of x, where that is known.

    Raises ValueError where `refusal` has a reason.
    """
    if not len(x_TD):
        return torch.empty_like(x_TD)
    return expert_terms(x_TD, gate_up, down, weight_TA, expert_TA, shared, quantized).summed()


def expert_terms(
    x_TD: Tensor,
    gate_up: Tensor | BlockScaled,
    down: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Terms:
    """What `grouped_experts` adds up. Raises ValueError where `refusal` has a reason."""
    if reason := refusal(x_TD, gate_up, down, shared):
        raise ValueError(f"grouped_experts[cuda] {reason}; use impl='triton'")
    from glm5.kernels.grouped_experts.triton import tiles_by_expert

    assert isinstance(gate_up, BlockScaled)
    assert isinstance(down, BlockScaled)
    expert_TA = expert_TA.contiguous()
    planned = tiles_by_expert(expert_TA, len(down.data), ROWS)
    y = terms(quantized or act_quant(x_TD), gate_up, down, weight_TA.contiguous(), planned, shared)
    num_tokens, active = expert_TA.shape
    return Terms(y, num_tokens, active, shared is not None)


def terms(
    quantized: tuple[Tensor, Tensor],
    gate_up: BlockScaled,
    down: BlockScaled,
    weight_TA: Tensor,
    planned: tuple[Tensor, Tensor],
    shared: SharedExpert | None,
) -> Tensor:
    """[T * A + T, D] in bfloat16: pair by pair, then those of the shared expert. `planned`: of `tiles_by_expert`."""
    (x_fp8, x_scale), (order, tiles), device = quantized, planned, weight_TA.device
    (num_tokens, active), (_, width, inner) = weight_TA.shape, down.data.shape
    rows = num_tokens * (active + 1)
    shared_tiles = 0 if shared is None else -(-num_tokens // ROWS)
    own = shared or SharedExpert(gate_up, gate_up, down)
    gate, up, shared_down = (weight for weight in own if isinstance(weight, BlockScaled))
    h = torch.empty(rows, inner, dtype=FP8, device=device)
    h_scale = torch.empty(inner // BLOCK, rows, dtype=torch.float32, device=device)
    y = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    sizes = (num_tokens, len(tiles) - 1, shared_tiles)
    grid, made_for = (triton_support.multiprocessors(device), 1), (active, width, inner)
    _kernel("up", *made_for, device)(
        grid,
        _THREADS,
        x_fp8.contiguous(),
        x_scale.T.contiguous(),
        order,
        tiles,
        weight_TA,
        *(_map(weight) for weight in (gate_up, gate, up)),
        *(weight.scale for weight in (gate_up, gate, up)),
        h,
        h_scale,
        *sizes,
    )
    _kernel("down", *made_for, device)(
        grid,
        _THREADS,
        h,
        h_scale,
        order,
        tiles,
        *(_map(weight) for weight in (down, shared_down)),
        *(weight.scale for weight in (down, shared_down)),
        y,
        *sizes,
    )
    return y


def _map(weight: BlockScaled) -> cuda_code.TileMap:
    data = weight.data
    return cuda_code.tile_map(data.data_ptr(), data.numel() // data.shape[-1], data.shape[-1], BLOCK)


def shared_bytes(name: str) -> int:
    """Of a program's memory, as rows.cu lays it out."""
    stage = -(-(256 * BLOCK + ROWS * BLOCK + 4 * (ROWS + 2)) // 1024) * 1024
    return 1024 + _STAGES[name] * (stage + 16) + ROWS * (40 + _PITCHES[name])


@cache
def _kernel(name: str, active: int, width: int, inner: int, device: torch.device) -> cuda_code.CudaKernel:
    sizes = {"A": active, "D": width, "F": inner, "STAGES": _STAGES[name], "IS_UP": int(name == "up")}
    kernel = cuda_code.build(SOURCE, name, shared_bytes(name), device, **sizes)
    assert kernel is not None
    return kernel
