"""add_rows on a GPU without atomics: rows are sorted by slot, and a program sums those of one slot."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _add(to_ptr, row_ptr, order_ptr, begin_ptr, L, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(begin_ptr + s), tl.load(begin_ptr + s + 1)
    if end > begin:
        total = tl.load(to_ptr + s * L + column, mask=column < L, other=0.0)
        for g in range(begin, end):
            row = tl.load(order_ptr + g) * L
            total += tl.load(row_ptr + row + column, mask=column < L, other=0.0).to(total.dtype)
        tl.store(to_ptr + s * L + column, total, mask=column < L)


@torch.no_grad()
def add_rows(to_SL: Tensor, slot_G: Tensor, row_GL: Tensor) -> None:
    """As `reference.add_rows`; `to_SL` is contiguous."""
    num_slots, width = to_SL.shape
    sorted_G, order_G = slot_G.sort(stable=True)
    slots = torch.arange(num_slots + 1, dtype=sorted_G.dtype, device=slot_G.device)
    begin_S1 = torch.searchsorted(sorted_G, slots)
    block = min(_BLOCK, triton.next_power_of_2(width))
    if num_slots and len(slot_G):
        grid = (num_slots, triton.cdiv(width, block))
        _add[grid](to_SL, row_GL.contiguous(), order_G, begin_S1, width, BLOCK=block, num_warps=max(1, block // 256))
