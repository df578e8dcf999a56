"""best_token in two launches: the maximum of pieces of rows, then of each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import dependent_launch

_PIECE = 4096


@triton.jit
def _pieces(x_ptr, value_ptr, index_ptr, W, stride, PIECE: tl.constexpr, PDL: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = piece * PIECE + tl.arange(0, PIECE)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    x = tl.load(x_ptr + row * stride + w, mask=w < W, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN wins and is detected
    value, place = tl.max(x, 0, return_indices=True)
    at = row * tl.num_programs(1) + piece
    tl.store(value_ptr + at, value)
    tl.store(index_ptr + at, piece * PIECE + place)


@triton.jit
def _best(value_ptr, index_ptr, token_ptr, no_valid_token_ptr, pieces, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    value, place = tl.max(
        tl.load(value_ptr + row * pieces + p, mask=p < pieces, other=float("-inf")), 0, return_indices=True
    )
    tl.store(token_ptr + row, tl.load(index_ptr + row * pieces + place).to(tl.int64))
    tl.store(no_valid_token_ptr + row, (value == float("inf")) | (value == float("-inf")))


def best_token(logits_TW: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.best_token`."""
    logits_TW = logits_TW if logits_TW.stride(-1) == 1 else logits_TW.contiguous()
    (num_rows, width), device = logits_TW.shape, logits_TW.device
    token_T = torch.empty(num_rows, dtype=torch.int64, device=device)
    no_valid_token_T = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return token_T, no_valid_token_T
    pieces = triton.cdiv(width, _PIECE)
    value = torch.empty(num_rows, pieces, dtype=torch.float32, device=device)
    index = torch.empty(num_rows, pieces, dtype=torch.int32, device=device)
    options = dependent_launch(device)
    _pieces[(num_rows, pieces)](logits_TW, value, index, width, logits_TW.stride(0), PIECE=_PIECE, **options)
    block = max(16, triton.next_power_of_2(pieces))
    _best[(num_rows,)](value, index, token_T, no_valid_token_T, pieces, BLOCK=block, num_warps=1, **options)
    return token_T, no_valid_token_T
