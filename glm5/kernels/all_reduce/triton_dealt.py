"""Many rows over GPUs that write into each other's memory (triton_buffers.py), half of a sum at a time.

    dealt    rank r gets the r-th of N equal shares of rows: the sum over ranks, added to the residual stream, its norm
    gather   the shares of all ranks, side by side

Two launches each. The first sends and waits for nothing; a program of the second waits for what others sent and empties
the place where it came. So no program waits for one that has yet to begin, and grids may be of any size. The second is
a dependent launch that begins once all programs of the first have, and ends after them: what follows it may write where
they read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.all_reduce.triton_buffers import (
    MAX_WIDTH,
    NUM_BUFFERS,
    Buffers,
    buffer,
    empty_last,
    end,
    finish,
    sendable,
    wait,
    wait_sum,
)
from glm5.kernels.all_reduce.triton_terms import send_terms
from glm5.kernels.grouped_experts.terms import Terms
from glm5.kernels.row_codes import Quantized
from glm5.kernels.triton_fp8 import let_later_begin, wait_for_earlier
from glm5.kernels.triton_support import dependent_launch

_CHUNK_BYTES = 8192  # that a program sends, or takes in

Norm = tuple[Tensor, Tensor, float]  # residual of this rank's rows, weight, eps


@triton.jit
def _send(
    pointers,
    state,
    part_ptr,
    rank,
    num_words,
    count,
    stride,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """`count` elements for each other rank, which begin `stride` apart; neighbouring programs have different ones."""
    wait_for_earlier(PDL)
    call = tl.load(state)
    let_later_begin(PDL)
    slot = (call % NUM).to(tl.int64)
    peer = ((rank + 1 + tl.program_id(0) % (SIZE - 1)) % SIZE).to(tl.int64)
    e = (tl.program_id(0) // (SIZE - 1)) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(part_ptr + peer * stride + e, mask=e < count, other=0)
    place = buffer(pointers, peer, slot, num_words, part_ptr) + rank * count + e
    tl.store(place, sendable(x), mask=e < count)
    empty_last(pointers, state, rank, call, num_words, CHUNK, NUM)


@triton.jit
def _add_up(
    pointers,
    state,
    part_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    codes_ptr,
    scale_ptr,
    rank,
    num_words,
    count,
    D,
    stride_r,
    eps,
    stride_b,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_OWN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    NUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row of this rank's share a program. HAS_OWN: what this rank adds lies in `part`, else it was sent too."""
    call = tl.load(state)
    let_later_begin(PDL)
    slot = (call % NUM).to(tl.int64)
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mine, own = tl.zeros((BLOCK_D,), part_ptr.dtype.element_ty), -1
    if HAS_OWN:
        mine, own = sendable(tl.load(part_ptr + t * D + d, mask=d < D, other=0.0)), rank
    residual = tl.load(residual_ptr + t * stride_r + d, mask=d < D, other=0.0)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
    place = buffer(pointers, rank, slot, num_words, part_ptr) + t * D + d
    total = wait_sum(place, count, d < D, own, mine, SIZE, BLOCK_D).to(mine.dtype)
    tl.debug_barrier()  # all have read
    for r in tl.static_range(SIZE):
        _empty(place + r * count, d < D)
    at = out_ptr, sum_ptr, codes_ptr, scale_ptr, stride_b
    finish(total, residual, weight, t, d, D, *at, eps, NORM=True, QUANTIZE=QUANTIZE)
    wait_for_earlier(PDL)
    end(state, call, slot, 0)


@triton.jit
def _take_in(
    pointers,
    state,
    part_ptr,
    out_ptr,
    rank,
    num_words,
    count,
    stride,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A piece of one rank's words a program; in `out` ranks lie `stride` apart."""
    call = tl.load(state)
    let_later_begin(PDL)
    slot = (call % NUM).to(tl.int64)
    r = (tl.program_id(0) % SIZE).to(tl.int64)
    e = (tl.program_id(0) // SIZE) * CHUNK + tl.arange(0, CHUNK)
    if r == rank:
        tl.store(out_ptr + r * stride + e, sendable(tl.load(part_ptr + e, mask=e < count, other=0)), mask=e < count)
    else:
        place = buffer(pointers, rank, slot, num_words, part_ptr) + r * count + e
        x = wait(place, e < count)
        tl.debug_barrier()
        _empty(place, e < count)
        tl.store(out_ptr + r * stride + e, x, mask=e < count)
    wait_for_earlier(PDL)
    end(state, call, slot, 0)


@triton.jit
def _empty(place, mask):
    if place.dtype.element_ty.primitive_bitwidth == 16:
        tl.store(place.to(tl.pointer_type(tl.int16)), tl.full(place.shape, -32768, tl.int16), mask=mask)
    else:
        tl.store(place.to(tl.pointer_type(tl.int32)), tl.full(place.shape, -0x7FFF8000, tl.int32), mask=mask)


def can_deal(buffers: Buffers, part: Tensor | Terms) -> bool:
    """Whether rows [T, D] can go this way."""
    num_rows, width = part.shape
    dtype = part.y.dtype if isinstance(part, Terms) else part.dtype
    is_known = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return is_known and num_rows % buffers.size == 0 and width % 8 == 0 and width <= MAX_WIDTH


def dealt(
    buffers: Buffers,
    part: Tensor | Terms,
    norm: Norm,
    quantized: Quantized | None = None,
    *,
    max_rows: int | None = None,
    num_warps: int = 16,
) -> tuple[Tensor, Tensor]:
    """(out, sum) of this rank's share, [T / ranks, D] each: `add_rms_norm` of the sum over ranks. Terms are added up on
    their way.

    `quantized`: filled with out as codes. `max_rows`: of all ranks' shares together, at a time.
    """
    (num_rows, width), size = part.shape, buffers.size
    share = num_rows // size
    residual_OD, weight_D, eps = norm
    residual_OD = residual_OD if residual_OD.stride(-1) == 1 else residual_OD.contiguous()
    if isinstance(part, Terms):
        out_OD = torch.empty(share, width, dtype=part.y.dtype, device=part.y.device)
        own_OD = out_OD  # read nowhere
    else:
        part = part.contiguous().view(size, share, width)
        own_OD = part[buffers.rank]
        out_OD = torch.empty_like(own_OD)
    sum_OD = torch.empty_like(out_OD)
    data, scale = (out_OD, out_OD) if quantized is None else quantized
    room = buffers.num_words * 4 // (size * width * out_OD.element_size())
    step = min(share, room, max(1, (max_rows or num_rows) // size))
    for first in range(0, share, step):
        rows = slice(first, min(first + step, share))
        count = (rows.stop - first) * width
        if isinstance(part, Terms):
            send_terms(buffers, part, rows)
        else:
            _sent(buffers, part[0, first:], count, share * width)
        _add_up[(rows.stop - first,)](
            buffers.pointers,
            buffers.state,
            own_OD[rows],
            residual_OD[rows],
            weight_D,
            out_OD[rows],
            sum_OD[rows],
            data[rows],
            scale[rows],
            buffers.rank,
            buffers.num_words,
            count,
            width,
            residual_OD.stride(0),
            eps,
            0 if quantized is None else scale.stride(-1),
            SIZE=size,
            BLOCK_D=max(128, triton.next_power_of_2(width)),
            HAS_OWN=not isinstance(part, Terms),
            QUANTIZE=quantized is not None,
            NUM=NUM_BUFFERS,
            num_warps=num_warps,
            **dependent_launch(out_OD.device),
        )
    return out_OD, sum_OD


def gather(buffers: Buffers, part: Tensor) -> Tensor:
    """[N, ...] of whatever is a whole number of words. A word 0x80008000 becomes 0x80008001, on every rank."""
    words = part.contiguous().view(-1).view(torch.int32)
    out = torch.empty((buffers.size, *part.shape), dtype=part.dtype, device=part.device)
    out_NW = out.view(buffers.size, -1).view(torch.int32)
    step = buffers.num_words // buffers.size // 32 * 32
    for first in range(0, len(words), step):
        count = min(step, len(words) - first)
        _sent(buffers, words[first:], count, 0)
        _take_in[(triton.cdiv(count, _CHUNK_BYTES // 4) * buffers.size,)](
            buffers.pointers,
            buffers.state,
            words[first:],
            out_NW[:, first:],
            buffers.rank,
            buffers.num_words,
            count,
            len(words),
            SIZE=buffers.size,
            CHUNK=_CHUNK_BYTES // 4,
            NUM=NUM_BUFFERS,
            num_warps=8,
            **dependent_launch(out.device),
        )
    return out


def _sent(buffers: Buffers, part: Tensor, count: int, stride: int) -> None:
    """The first `count` elements of `part` go to rank 0, those that begin `stride` further on to rank 1, .."""
    chunk = _CHUNK_BYTES // part.element_size()
    _send[(triton.cdiv(count, chunk) * (buffers.size - 1),)](
        buffers.pointers,
        buffers.state,
        part,
        buffers.rank,
        buffers.num_words,
        count,
        stride,
        SIZE=buffers.size,
        CHUNK=chunk,
        NUM=NUM_BUFFERS,
        num_warps=8,
        **dependent_launch(part.device),
    )
