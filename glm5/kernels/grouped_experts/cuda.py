"""grouped_experts of many tokens on Hopper, in CUDA C++: plan.cu finds tiles of rows, rows.cu computes both products in
one launch. A Triton kernel sums the outputs of each token."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels import cuda_code, triton_support
from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import BLOCK, FP8, BlockScaled
from glm5.kernels.grouped_experts import plan
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.kernels.grouped_experts.shared import SharedExpert

SOURCE = Path(__file__).with_name("rows.cu")
ROWS, _THREADS, _SLICE = 96, 384, 256  # as in rows.cu
SHARED_BYTES = 232_320  # of a program of rows.cu, which checks that it needs as many


def is_faster(num_pairs: int, num_experts: int, inner: int) -> bool:
    """Whether it is faster than Triton, measured on an H200 at GLM-5's sizes (docs/performance-kernels.md): if most
    experts have one tile of rows, and for a small `inner` at least 32 rows."""
    least = 16 if inner >= 512 else 32
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
    if len(down[0]) > plan.MAX_EXPERTS:
        return f"needs at most {plan.MAX_EXPERTS} experts, got {len(down[0])}"
    return cuda_code.missing_on(x_TD.device)


def grouped_experts(
    x_TD: Tensor,
    gate_up: Tensor | BlockScaled,
    down: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[T, D] in bfloat16. `quantized`: `act_quant` of x, if the caller has it.

    Raises ValueError where `refusal` has a reason.
    """
    if not len(x_TD):
        return torch.empty_like(x_TD)
    return expert_outputs(x_TD, gate_up, down, weight_TA, expert_TA, shared, quantized).summed()


def expert_outputs(
    x_TD: Tensor,
    gate_up: Tensor | BlockScaled,
    down: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> ExpertOutputs:
    """The summands of `grouped_experts`. Raises ValueError where `refusal` has a reason."""
    if reason := refusal(x_TD, gate_up, down, shared):
        raise ValueError(f"grouped_experts[cuda] {reason}; use impl='triton'")
    assert isinstance(gate_up, BlockScaled)
    assert isinstance(down, BlockScaled)
    quantized = quantized or act_quant(x_TD)
    return weighted_outputs(quantized, gate_up, down, weight_TA.contiguous(), expert_TA.int().contiguous(), shared)


def weighted_outputs(
    quantized: tuple[Tensor, Tensor],
    gate_up: BlockScaled,
    down: BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None,
) -> ExpertOutputs:
    """Outputs in bfloat16, grouped by expert. `expert_TA` is int32."""
    (x_fp8, x_scale), device = quantized, weight_TA.device
    (num_tokens, active), (num_experts, width, inner) = weight_TA.shape, down.data.shape
    rows = num_tokens * (active + 1)
    own = shared or SharedExpert(gate_up, gate_up, down)
    gate, up, shared_down = (weight for weight in own if isinstance(weight, BlockScaled))
    weights = gate_up, gate, up, down, shared_down
    shared_tiles = 0 if shared is None else -(-num_tokens // ROWS)
    planned = plan.plan_on_hopper(expert_TA, num_experts, ROWS, shared_tiles)
    h = torch.empty(rows, inner, dtype=FP8, device=device)
    h_scale = torch.empty(inner // BLOCK, rows, dtype=torch.float32, device=device)
    y = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    _kernel(active, width, inner, device)(
        (triton_support.multiprocessors(device), 1),
        _THREADS,
        x_fp8.contiguous(),
        x_scale.T.contiguous(),
        planned.order,
        planned.tiles,
        planned.counters,
        weight_TA,
        *(_map(weight) for weight in weights),
        *(weight.scale for weight in weights),
        h,
        h_scale,
        y,
        num_tokens,
        len(planned.tiles) - 1,
        shared_tiles,
    )
    return ExpertOutputs(y, num_tokens, active, shared is not None, planned.places)


def _map(weight: BlockScaled) -> cuda_code.TileMap:
    data = weight.data
    return cuda_code.tile_map(data.data_ptr(), data.numel() // data.shape[-1], data.shape[-1], BLOCK)


def constants(active: int, width: int, inner: int) -> dict[str, int]:
    """Constants of rows.cu."""
    return {"A": active, "D": width, "F": inner, "SHARED_BYTES": SHARED_BYTES}


@cache
def _kernel(active: int, width: int, inner: int, device: torch.device) -> cuda_code.CudaKernel:
    return cuda_code.build(SOURCE, "experts", SHARED_BYTES, device, **constants(active, width, inner))
