"""quantized_experts of few tokens on Hopper, in CUDA C++ (few.cu), for bfloat16 x and int4 codes. One kernel prepares
rows, two compute the products. Each starts and loads its weights before the previous one has ended (PDL)."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.kernels import cuda_code
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat

SOURCE = Path(__file__).with_name("few.cu")
# As in few.cu.
_WARPS, _CHUNK, _TILE, _MAX_PAIRS = 8, 128, 8, 256
_HELD = 8  # maximum chunks of a row that a warp loads ahead
_MAX_INNER, _MAX_ACTIVE = 512, 16
_MAX_ROWS = 4  # rows of x in a program


class Kernels(NamedTuple):
    """The kernels of few.cu, in launch order."""

    prepare: Callable[..., None]
    gate_up: Callable[..., None]
    down: Callable[..., None]


def most_tokens(weight_format: WeightFormat) -> int:
    """Up to here these kernels are faster than Triton's on an H200 (docs/performance-kernels.md)."""
    return 32 if weight_format.act == "int8" else 16


def refusal(x_TD: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, expert_TA: Tensor) -> str:
    """Why these cannot be handled; empty if they can."""
    weight_format, active = gate_up.format, expert_TA.shape[1]
    is_int4 = weight_format.weight == "int4" and (weight_format.group or 0) % _CHUNK == 0
    if x_TD.dtype != torch.bfloat16 or not is_int4 or down.format != weight_format:
        got = f"{x_TD.dtype} and {weight_format}"
        return f"needs rows in bfloat16 and int4 codes in groups of a multiple of {_CHUNK}, got {got}"
    most = most_tokens(weight_format)
    if not 0 < len(x_TD) <= most or expert_TA.numel() > _MAX_PAIRS or active > _MAX_ACTIVE:
        return f"is for 1 to {most} tokens of at most {_MAX_ACTIVE} experts, got {tuple(expert_TA.shape)}"
    if gate_up.width % _CHUNK or gate_up.width > _HELD * _CHUNK * _WARPS:
        return f"takes inputs of a multiple of {_CHUNK}, up to {_HELD * _CHUNK * _WARPS}, got {gate_up.width}"
    if down.width % _CHUNK or down.width > _MAX_INNER:
        return f"takes experts of a multiple of {_CHUNK} values, up to {_MAX_INNER}, got {down.width}"
    return cuda_code.missing_on(x_TD.device)


def quantized_experts(
    x_TD: Tensor,
    gate_up_proj: QuantizedWeight,
    down_proj: QuantizedWeight,
    weight_TA: Tensor,
    expert_TA: Tensor,
    plus_TD: Tensor | None = None,
) -> Tensor:
    """[T, D] in bfloat16, summed in float32 in the order of a token's choices. Raises ValueError where `refusal` has a
    reason."""
    gate_up_proj, down_proj = gate_up_proj.check(), down_proj.check()
    if reason := refusal(x_TD, gate_up_proj, down_proj, expert_TA):
        raise ValueError(f"quantized_experts[cuda] {reason}; use impl='triton'")
    (num_tokens, width), inner, active = x_TD.shape, down_proj.width, expert_TA.shape[1]
    kernels = _kernels(gate_up_proj.format, width, inner, active, num_tokens > 1, x_TD.device)
    return run(kernels, x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, plus_TD)


def run(
    kernels: Kernels,
    x_TD: Tensor,
    gate_up_proj: QuantizedWeight,
    down_proj: QuantizedWeight,
    weight_TA: Tensor,
    expert_TA: Tensor,
    plus_TD: Tensor | None = None,
) -> Tensor:
    """Launch the compiled kernels. No other kernel may come between, or choices would be read too early."""
    (num_tokens, width), inner = x_TD.shape, down_proj.width
    num_pairs, active = expert_TA.numel(), expert_TA.shape[1]
    x_TD, weight_TA, expert_TA = x_TD.contiguous(), weight_TA.float().contiguous(), expert_TA.int().contiguous()
    rows = torch.empty(num_tokens, _row_bytes(gate_up_proj.format, width), dtype=torch.uint8, device=x_TD.device)
    scale_T = torch.empty(num_tokens, dtype=torch.float32, device=x_TD.device)
    h, out_TD = x_TD.new_empty(num_pairs, inner), torch.empty_like(x_TD)
    kernels.prepare((num_tokens, 1), 32 * _WARPS, x_TD, rows, scale_T)
    programs = (inner // _TILE, num_pairs)
    codes, scale, _ = gate_up_proj
    kernels.gate_up(programs, 32 * _WARPS, rows, scale_T, expert_TA, codes, scale, h, num_pairs)
    plus_TD = None if plus_TD is None else plus_TD.contiguous()
    programs = (num_tokens, width // (2 * _TILE * _tiles(num_tokens > 1)))
    kernels.down(programs, 32 * active, h, expert_TA, weight_TA, down_proj.codes, down_proj.scale, plus_TD, out_TD)
    return out_TD


def constants_for(weight_format: WeightFormat, width: int, inner: int, active: int, many: bool) -> dict[str, int]:
    """Constants of few.cu, measured as fastest on an H200 at GLM-5's sizes (docs/performance-kernels.md)."""
    return {
        "ACT": {None: 0, "int8": 1, "fp8": 2}[weight_format.act],
        "GROUP": weight_format.group or 0,
        "D": width,
        "F": inner,
        "A": active,
        "MANY": int(many),
        "ROWS": _MAX_ROWS if many else 1,
        "TILES": _tiles(many),
        "UP_BLOCKS": 2 if many and weight_format.act != "int8" else 3,
        "DOWN_BLOCKS": 3 if many else 4,
    }


def _tiles(many: bool) -> int:
    """Tiles of 16 outputs per program."""
    return 2 if many else 1


def _row_bytes(weight_format: WeightFormat, width: int) -> int:
    """Bytes of a prepared row of x; e4m3 is stored as float16."""
    return width * (1 if weight_format.act == "int8" else 2)


@cache
def _kernels(
    weight_format: WeightFormat, width: int, inner: int, active: int, many: bool, device: torch.device
) -> Kernels:
    constants = constants_for(weight_format, width, inner, active, many)
    shared_bytes = constants["ROWS"] * (_row_bytes(weight_format, width) + 64)

    def made(name: str, shared_bytes: int = 0) -> cuda_code.CudaKernel:
        return cuda_code.build(SOURCE, name, shared_bytes, device, **constants)

    return Kernels(made("prepare"), made("gate_up", shared_bytes), made("down"))
