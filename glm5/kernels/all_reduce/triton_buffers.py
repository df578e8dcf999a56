"""Symmetric buffers of the collectives in this folder, which need no flags and no barriers.

A buffer is filled with EMPTY, a bit pattern that is never sent (minus zero in 16 bits), and a reader waits until none
is left. Calls rotate through three buffers: while one is read, a faster rank may write to the next, and the previous
one is cleared. Sums are taken in the order of ranks in float32 and rounded once, so every rank has the same bits.

`Buffers.state`, int32 on the device: the index of the current buffer, the number of finished programs, and the words
used of each buffer. A CUDA graph can hold any number of calls. One stream at a time, and all ranks make the same calls.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.kernels.grouped_experts.triton_few import sum_of_outputs
from glm5.kernels.triton_rows import put_codes

NUM_BUFFERS = 3
MAX_WIDTH = 1 << 14


@dataclass(frozen=True)
class Buffers:
    """The buffers of all ranks: `pointers` int64 [ranks], each to NUM_BUFFERS buffers of `num_words` 4-byte words.
    `max_programs`: how many programs run at once."""

    pointers: Tensor
    state: Tensor
    rank: int
    size: int
    num_words: int
    max_programs: int


def empty_state(device: torch.device) -> Tensor:
    """The state of unused buffers."""
    return torch.zeros(2 + NUM_BUFFERS, dtype=torch.int32, device=device)


def empty(words: Tensor) -> None:
    """Fill int32 memory with EMPTY."""
    words.fill_(EMPTY_WORD)


EMPTY_WORD = -0x7FFF8000  # 0x80008000: two times minus zero in 16 bits, next to zero in 32


@triton.jit
def is_empty(x):
    if x.dtype.primitive_bitwidth == 16:
        is_empty = x.to(tl.int16, bitcast=True) == -32768
    else:
        is_empty = x.to(tl.int32, bitcast=True) == -0x7FFF8000
    return is_empty


@triton.jit
def sendable(x):
    """x without EMPTY: in 16 bits minus zero becomes zero; in 32 bits one number next to zero becomes its neighbour."""
    if x.dtype.primitive_bitwidth == 16:
        sendable = tl.where(is_empty(x), tl.zeros_like(x), x)
    else:
        bits = x.to(tl.int32, bitcast=True)
        sendable = tl.where(bits == -0x7FFF8000, bits + 1, bits).to(x.dtype, bitcast=True)
    return sendable


@triton.jit
def new_row(part_ptr, t, d, T, D, A: tl.constexpr, SHARED: tl.constexpr, place_ptr):
    """Row t of a part: the sum of its A expert outputs and the shared expert's; for A = 0 the row itself."""
    if A > 0:
        x = sum_of_outputs(part_ptr, t, d, T, D, A, SHARED, place_ptr).to(part_ptr.dtype.element_ty)
    else:
        x = tl.load(part_ptr + t * D + d, mask=d < D, other=0.0)
    return x


def new_rows(part: Tensor | ExpertOutputs) -> tuple[Tensor, dict[str, object]]:
    """The tensor that `new_row` reads, and its options."""
    if isinstance(part, ExpertOutputs):
        return part.y, {"A": part.active, "SHARED": part.has_shared, "place_ptr": part.places}
    return part.contiguous(), {"A": 0, "SHARED": False, "place_ptr": None}


@triton.jit
def buffer(pointers, rank, slot, num_words, like):
    """The start of a rank's buffer as a pointer of `like`'s type."""
    address = tl.load(pointers + rank) + slot * num_words * 4
    return tl.multiple_of(address.to(like.dtype), 16)


@triton.jit
def empty_last(pointers, state, rank, slot_index, num_words, CHUNK: tl.constexpr, NUM: tl.constexpr):
    """Clear the previous call's buffer; each program clears a part."""
    slot = (slot_index + NUM - 1) % NUM
    used = tl.load(state + 2 + slot)
    words = (tl.load(pointers + rank) + slot.to(tl.int64) * num_words * 4).to(tl.pointer_type(tl.int32))
    words = tl.multiple_of(words, 16)
    for first in range(tl.program_id(0) * CHUNK, used, tl.num_programs(0) * CHUNK):
        place = first + tl.arange(0, CHUNK)
        tl.store(words + place, tl.full((CHUNK,), -0x7FFF8000, tl.int32), mask=place < used)


@triton.jit
def end(state, slot_index, slot, used, NUM: tl.constexpr):
    """The last program to arrive advances to the next buffer. (A counter of calls would overflow in two days.)"""
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state + 2 + slot, used)
        tl.store(state, (slot_index + 1) % NUM)


# Triton 3.6 does not compile loops that carry tensors, so data is loaded again after the loop.


@triton.jit
def wait(place, mask):
    """The data at `place`, once all of it has arrived."""
    missing = 1
    while missing != 0:
        x = tl.load(place, mask=mask, other=1, volatile=True)
        missing = tl.max(is_empty(x).to(tl.int32), 0)
    return tl.load(place, mask=mask, other=1, volatile=True)


@triton.jit
def unless(mask, rank, r):
    """The mask, all False if r is this rank."""
    return mask & (tl.zeros(mask.shape, tl.int32) + r != rank)


@triton.jit
def wait_sum(place, stride, mask, rank, own, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over ranks of data `stride` apart, with `own` for this rank, whose slot is not read."""
    missing = 1
    while missing != 0:
        is_missing = tl.zeros((BLOCK,), tl.int32)
        for r in tl.static_range(SIZE):
            x = tl.load(place + r * stride, mask=unless(mask, rank, r), other=1.0, volatile=True)
            is_missing |= is_empty(x).to(tl.int32)
        missing = tl.max(is_missing, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(SIZE):
        x = tl.load(place + r * stride, mask=unless(mask, rank, r), other=1.0, volatile=True)
        total += tl.where(rank == r, own, x).to(tl.float32)
    return total


@triton.jit
def finish(
    x,
    residual,
    weight,
    t,
    d,
    D,
    out_ptr,
    sum_ptr,
    codes_ptr,
    scale_ptr,
    stride_b,
    eps,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """Store a row's sum. With NORM, add it to the residual stream, and store that and its norm; with QUANTIZE also its
    codes."""
    mask = d < D
    if NORM:
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + t * D + d, x, mask=mask)
        wide = tl.where(mask, x.to(tl.float32), 0.0)
        normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)).to(x.dtype)
        x = (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + t * D + d, x, mask=mask)
    if QUANTIZE:
        put_codes(x, t, d, D, codes_ptr, scale_ptr, stride_b)
