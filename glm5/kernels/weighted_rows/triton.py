"""weighted_rows in one pass: rows are read in place, and only the sum is written."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _sum(row_ptr, slot_ptr, weight_ptr, out_ptr, D, A: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(A):
        slot = tl.load(slot_ptr + t * A + a)
        row = tl.load(row_ptr + slot * D + d, mask=d < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weight_ptr + t * A + a).to(tl.float32)
        total += row
    tl.store(out_ptr + t * D + d, total, mask=d < D)


@torch.no_grad()
def weighted_rows(row_GD: Tensor, slot_TA: Tensor, weight_TA: Tensor | None) -> Tensor:
    """As `reference.weighted_rows`."""
    row_GD, (num_tokens, num_rows), width = row_GD.contiguous(), slot_TA.shape, row_GD.shape[1]
    out_TD = row_GD.new_empty(num_tokens, width)
    block = min(_BLOCK, triton.next_power_of_2(width))
    weighted = weight_TA is not None
    if num_tokens:
        _sum[(num_tokens, triton.cdiv(width, block))](
            row_GD,
            slot_TA.long().contiguous(),
            weight_TA.contiguous() if weight_TA is not None else row_GD,
            out_TD,
            width,
            A=num_rows,
            WEIGHTED=weighted,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
    return out_TD
