"""quantized_linear of decoding on Hopper, in CUDA C++: int8 weights with one scale per row, int8 activations (w8a8), as
in attention and shared experts. x is bfloat16.

    few.cu     up to 16 tokens: 16 rows of weights a program
    tiles.cu   17 to 128: 128 rows a program, or a cluster of programs that splits the inputs
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels import cuda_code
from glm5.kernels.fp8_linear.cuda import cut_for
from glm5.kernels.quantized_linear.tiling import Tiling, measured_for
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat
from glm5.kernels.row_codes import Quantized
from glm5.kernels.token_quant import token_quant

FEW, TILES = Path(__file__).with_name("few.cu"), Path(__file__).with_name("tiles.cu")
FORMAT = WeightFormat("int8", None, "int8")
FEW_TOKENS, MAX_TOKENS = 16, 128
_UNIT = 128  # of inputs
# As in few.cu.
_FEW_ROWS, _FEW_THREADS = 16, 256
_FEW_SHARED = 100_000  # bytes of shared memory, so that two programs fit on a multiprocessor
# As in tiles.cu; bytes of shared memory.
_TILE_ROWS, _TILE_THREADS, _TILE_SHARED = 128, 288, 220 << 10
_MAX_STAGES = 12


def refusal(x_TD: Tensor, weight: QuantizedWeight) -> str:
    """Why these cannot be handled; empty if they can."""
    if x_TD.dtype != torch.bfloat16 or weight.format != FORMAT:
        return f"needs rows in bfloat16 and weights in {FORMAT}, got {x_TD.dtype} and {weight.format}"
    if not 0 < len(x_TD) <= MAX_TOKENS:
        return f"is for 1 to {MAX_TOKENS} tokens, got {len(x_TD)}"
    width, is_few = weight.width, len(x_TD) <= FEW_TOKENS
    if width % _UNIT or (is_few and _few_bytes(width, len(x_TD)) > _FEW_SHARED):
        return f"takes inputs of a multiple of {_UNIT}, as long as few tokens fit into shared memory, got {width}"
    if not is_few and len(weight.codes) % 4:
        return f"takes a multiple of 4 outputs for more than {FEW_TOKENS} tokens, got {len(weight.codes)}"
    return cuda_code.missing_on(x_TD.device)


def quantized_linear(
    x_TD: Tensor, weight: QuantizedWeight, tiling: Tiling | None = None, *, x_quantized: Quantized | None = None
) -> Tensor:
    """[T, O] in bfloat16, the reference's bits. Raises ValueError where `refusal` has a reason.

    The cluster size is that of `tiling`, else the measured one, else that of FP8, which has as many bytes.
    """
    weight.check()
    if reason := refusal(x_TD, weight):
        raise ValueError(f"quantized_linear[cuda] {reason}; use impl='triton'")
    if len(x_TD) <= FEW_TOKENS:
        return run_few(_few_kernel(weight.width, _num_token_tiles(len(x_TD)), x_TD.device), x_TD, weight, x_quantized)
    columns = next(n for n in (32, 64, 128) if n >= len(x_TD))
    tiling = tiling or measured_for(x_TD, weight)
    cluster = tiling.cluster if tiling else 0
    kernel = _tiles_kernel(columns, x_TD.device)
    cluster = cluster or cut_for(*weight.codes.shape).shares
    return run_tiles(kernel, columns, x_TD, weight, cluster, x_quantized)


def run_few(
    kernel: Callable[..., None], x_TD: Tensor, weight: QuantizedWeight, x_quantized: Quantized | None = None
) -> Tensor:
    """Launch the compiled kernel after the one that quantizes tokens."""
    rows, scale_T, out_TO = _prepared(x_TD, weight, x_quantized)
    num_tokens, num_rows = out_TO.shape
    programs = (-(-num_rows // _FEW_ROWS), 1)
    kernel(programs, _FEW_THREADS, rows, scale_T, weight.codes, weight.scale, out_TO, num_tokens, num_rows)
    return out_TO


def run_tiles(
    kernel: Callable[..., None],
    columns: int,
    x_TD: Tensor,
    weight: QuantizedWeight,
    cluster: int,
    x_quantized: Quantized | None = None,
) -> Tensor:
    """Likewise; the kernel is compiled for `columns` tokens."""
    rows, scale_T, out_TO = _prepared(x_TD, weight, x_quantized)
    (num_tokens, num_rows), width = out_TO.shape, weight.width
    kernel(
        (cluster, -(-num_rows // _TILE_ROWS)),
        _TILE_THREADS,
        cuda_code.tile_map(weight.codes.data_ptr(), num_rows, width, _TILE_ROWS),
        cuda_code.tile_map(rows.data_ptr(), num_tokens, width, columns),
        scale_T,
        weight.scale,
        out_TO,
        num_tokens,
        num_rows,
        width,
        cluster=cluster,
    )
    return out_TO


def constants_for(width: int, num_tokens: int) -> dict[str, int]:
    """Constants of few.cu."""
    return {"K": width, "TILES": _num_token_tiles(num_tokens), "BLOCKS": 2}


def _prepared(x_TD: Tensor, weight: QuantizedWeight, x_quantized: Quantized | None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes of x, their scales, a buffer for the result)."""
    rows, scale_T = x_quantized or token_quant(x_TD, "int8")
    return rows, scale_T, torch.empty(len(x_TD), len(weight.codes), dtype=x_TD.dtype, device=x_TD.device)


def _num_token_tiles(num_tokens: int) -> int:
    return -(-num_tokens // 8)


def _few_bytes(width: int, num_tokens: int) -> int:
    return 8 * _num_token_tiles(num_tokens) * (width + 64)


@cache
def _few_kernel(width: int, eights: int, device: torch.device) -> cuda_code.CudaKernel:
    num_tokens = 8 * eights
    return cuda_code.build(FEW, "few", _few_bytes(width, num_tokens), device, **constants_for(width, num_tokens))


@cache
def _tiles_kernel(columns: int, device: torch.device) -> cuda_code.CudaKernel:
    stage = _UNIT * (_TILE_ROWS + columns)
    stages = min(_MAX_STAGES, _TILE_SHARED // (stage + 16))
    shared_bytes = 1024 + stages * (stage + 16)
    return cuda_code.build(TILES, "tiles", shared_bytes, device, COLS=columns, STAGES=stages)
