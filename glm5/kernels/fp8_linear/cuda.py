"""fp8_linear of decoding on Hopper, in CUDA C++ (linear.cu): a cluster of thread blocks splits the columns
(split-K)."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.kernels import cuda_code
from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import BLOCK, BlockScaled, num_blocks

SOURCE = Path(__file__).with_name("linear.cu")
MAX_ROWS = 128
_THREADS, _ROOM = 320, 220 << 10  # as in linear.cu; bytes of shared memory
_PROGRAMS = 128  # clustered thread blocks that run at once
_MAX_STAGES = 8
_MIN_BLOCKS = 12  # of columns per program, if they are split
MIN_TOKENS = 5


class Cut(NamedTuple):
    """The split of the weight's columns: `shares` programs."""

    shares: int


def cut_for(rows: int, cols: int) -> Cut:
    """What was fastest on an H200 at GLM-5's sizes (docs/performance-kernels.md)."""
    tiles, blocks = num_blocks(rows), num_blocks(cols)
    return Cut(next(n for n in (4, 2, 1) if n == 1 or (n * tiles <= _PROGRAMS and _MIN_BLOCKS * n <= blocks)))


def is_faster(num_tokens: int, rows: int, cols: int) -> bool:
    """Whether it is faster than Triton's tiles: not for few rows, nor for many rows without a split."""
    if num_blocks(rows) > _PROGRAMS // 2 - 1:  # Triton's programs balance these better
        return False
    return MIN_TOKENS <= num_tokens <= (MAX_ROWS if cut_for(rows, cols).shares > 1 else MAX_ROWS // 2)


def runs_on(device: torch.device) -> bool:
    """Whether `device` is Hopper and NVRTC is installed."""
    return not cuda_code.missing_on(device)


def refusal(x_TD: Tensor, weight: BlockScaled) -> str:
    """Why these cannot be handled; empty if they can."""
    rows, cols = weight.data.shape
    if x_TD.dtype != torch.bfloat16 or len(x_TD) > MAX_ROWS:
        return f"needs up to {MAX_ROWS} rows in bfloat16, got {len(x_TD)} in {x_TD.dtype}"
    if rows % 4 or cols % BLOCK or not weight.data.is_contiguous():
        return f"needs whole weights of multiples of 4 and {BLOCK}, got [{rows}, {cols}]"
    return "" if runs_on(x_TD.device) else f"needs Hopper and NVRTC, got {x_TD.device}"


def fp8_linear(
    x_TD: Tensor, weight: BlockScaled, quantized: tuple[Tensor, Tensor] | None = None, cut: Cut | None = None
) -> Tensor:
    """[T, O] in bfloat16. Raises ValueError where `refusal` has a reason."""
    if reason := refusal(x_TD, weight.check()):
        raise ValueError(f"fp8_linear[cuda] {reason}; use impl='triton'")
    (num_tokens, cols), rows, device = x_TD.shape, len(weight.data), x_TD.device
    y_TO = torch.empty(num_tokens, rows, dtype=x_TD.dtype, device=device)
    if not num_tokens:
        return y_TO
    x_fp8, x_scale = quantized or act_quant(x_TD)
    x_fp8 = x_fp8.contiguous()
    shares = (cut or cut_for(rows, cols)).shares
    columns = next(n for n in (16, 32, 64, 128) if n >= num_tokens)
    _kernel(columns, device)(
        (shares, num_blocks(rows)),
        _THREADS,
        cuda_code.tile_map(weight.data.data_ptr(), rows, cols, BLOCK),
        cuda_code.tile_map(x_fp8.data_ptr(), num_tokens, cols, columns),
        x_scale.T.contiguous(),
        weight.scale.contiguous(),
        y_TO,
        num_tokens,
        rows,
        cols,
        cluster=shares,
    )
    return y_TO


@cache
def _kernel(columns: int, device: torch.device) -> cuda_code.CudaKernel:
    stage = -(-(128 * 128 + columns * 128 + 4 * (columns + 1)) // 1024) * 1024
    stages = min(_MAX_STAGES, _ROOM // (stage + 16))
    return cuda_code.build(SOURCE, "linear", 1024 + stages * (stage + 16), device, COLS=columns, STAGES=stages)
