"""Reduce-scatter and all-gather of many rows over GPUs that write into each other's memory (triton_buffers.py).

    add_rms_norm_sharded    rank r gets the r-th of N equal shares of rows: the sum over ranks, added to the residual
                            stream, and its norm
    gather                  the shares of all ranks, concatenated along rows, of several tensors at once

One launch each. Some programs only send. Every other one waits for data from programs of smaller numbers on peers, and
clears the buffer where it arrived. Programs begin in the order of their numbers, so a grid may be of any size without
deadlock, and the link and device memory are busy at the same time.

Outputs of a token's experts are summed while they are sent, so no sums are written and read again. Rows of an FP8
linear layer are sent by its kernel (fp8_linear/rows.cu) while other rows are computed; then nothing is sent here.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.all_reduce.part import PartialSum, computed
from glm5.kernels.all_reduce.reference import is_transposed
from glm5.kernels.all_reduce.triton_buffers import (
    MAX_WIDTH,
    NUM_BUFFERS,
    Buffers,
    buffer,
    empty_last,
    end,
    new_row,
    new_rows,
    sendable,
    unless,
    wait,
    wait_sum,
)
from glm5.kernels.fp8_linear import cuda_rows
from glm5.kernels.fp8_linear.pending import PendingLinear
from glm5.kernels.row_codes import Quantized
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait, quantized_row
from glm5.kernels.triton_rows import row_codes, row_scale
from glm5.kernels.triton_support import dependent_launch

_CHUNK_BYTES = 8192  # sent or received by a program of `gather`
_PIECE = 2048  # values of a row that a program of `add_rms_norm_sharded` processes at a time
_MIN_SENT_BYTES = 8 << 20  # from which on the overlapped product is faster: 23 us of the link

Norm = tuple[Tensor, Tensor, float]  # residual of this rank's rows, weight, eps


@triton.jit
def _reduce_scatter_norm(
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
    first,
    num_rows,
    share,
    T,
    D,
    stride_r,
    eps,
    stride_b,
    SIZE: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    PIECE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SENT: tl.constexpr,
    NUM: tl.constexpr,
    PDL: tl.constexpr,
    place_ptr=None,
):
    """For each of `num_rows` rows of every rank's share, from `first` on: one program per peer sends the peer's row,
    unless all rows were SENT before, and one program sums this rank's row."""
    PROGRAMS: tl.constexpr = 1 if SENT else SIZE  # of a row
    pdl_wait(PDL)
    slot_index = tl.load(state)
    pdl_launch_dependents(PDL)
    slot, count = slot_index.to(tl.int64), num_rows * D
    i, k = (tl.program_id(0) // PROGRAMS).to(tl.int64), tl.program_id(0) % PROGRAMS
    t = first + i
    if k < PROGRAMS - 1:
        peer = ((rank + 1 + k) % SIZE).to(tl.int64)
        place = buffer(pointers, peer, slot, num_words, part_ptr) + rank * count + i * D
        for begin in range(0, D, PIECE):
            d = begin + tl.arange(0, PIECE)
            tl.store(
                place + d, sendable(new_row(part_ptr, peer * share + t, d, T, D, A, SHARED, place_ptr)), mask=d < D
            )
    else:
        place = buffer(pointers, rank, slot, num_words, part_ptr) + i * D
        squares = 0.0
        for begin in range(0, D, PIECE):
            d = begin + tl.arange(0, PIECE)
            own = sendable(new_row(part_ptr, rank * share + t, d, T, D, A, SHARED, place_ptr))
            residual = tl.load(residual_ptr + t * stride_r + d, mask=d < D, other=0.0)
            total = wait_sum(place + d, count, d < D, rank, own, SIZE, PIECE).to(own.dtype)
            tl.debug_barrier()  # all have read
            for r in tl.static_range(SIZE):
                _empty(place + r * count + d, unless(d < D, rank, r))
            x = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
            tl.store(sum_ptr + t * D + d, x, mask=d < D)
            wide = tl.where(d < D, x.to(tl.float32), 0.0)
            squares += tl.sum(wide * wide, 0)
        tl.debug_barrier()  # all have written
        _put_normed(
            t,
            tl.rsqrt(squares / D + eps),
            D,
            sum_ptr,
            weight_ptr,
            out_ptr,
            codes_ptr,
            scale_ptr,
            stride_b,
            PIECE,
            QUANTIZE,
        )
    empty_last(pointers, state, rank, slot_index, num_words, PIECE, NUM)
    end(state, slot_index, slot, 0, NUM)


@triton.jit
def _put_normed(
    t,
    inverse,
    D,
    sum_ptr,
    weight_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    stride_b,
    PIECE: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """Row t of the residual stream times `inverse`, the reciprocal of its RMS, and the norm's weight. With QUANTIZE
    also its codes: e4m3 in blocks, or int8 with one scale."""
    IN_BLOCKS: tl.constexpr = QUANTIZE and codes_ptr.dtype.element_ty != tl.int8
    largest = 0.0
    for begin in range(0, D, PIECE):
        d = begin + tl.arange(0, PIECE)
        x = tl.load(sum_ptr + t * D + d, mask=d < D, other=0.0)
        weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
        normed = (x.to(tl.float32) * inverse).to(x.dtype)
        out = (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
        tl.store(out_ptr + t * D + d, out, mask=d < D)
        if IN_BLOCKS:
            codes, scale = quantized_row(out.to(tl.float32))
            b = begin // 128 + tl.arange(0, PIECE // 128)
            tl.store(codes_ptr + t * D + d, codes, mask=d < D)
            tl.store(scale_ptr + t + b * stride_b, scale, mask=b * 128 < D)
        else:
            largest = tl.maximum(largest, tl.max(tl.abs(out.to(tl.float32)), 0))
    if QUANTIZE and not IN_BLOCKS:
        scale = row_scale(tl.full([1], 0.0, tl.float32) + largest, "int8")
        tl.store(scale_ptr + t + tl.arange(0, 1), scale)
        tl.debug_barrier()  # all have written
        for begin in range(0, D, PIECE):
            d = begin + tl.arange(0, PIECE)
            out = tl.load(out_ptr + t * D + d, mask=d < D, other=0.0)
            tl.store(codes_ptr + t * D + d, row_codes(out.to(tl.float32), scale, "int8"), mask=d < D)


@triton.jit
def _gather(
    pointers,
    state,
    parts,
    outs,
    counts,
    runs,
    rank,
    num_words,
    first,
    BY_RUNS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """For each piece of CHUNK words, one program sends it to all peers and stores it, and one per peer receives the
    peer's piece. Pieces are numbered across all parts; this launch begins at `first`.

    BY_RUNS: a bit for each part that consists of runs; in `outs` the first runs of all ranks come first, then the
    second.
    """
    pdl_wait(PDL)
    slot_index = tl.load(state)
    pdl_launch_dependents(PDL)
    slot = slot_index.to(tl.int64)
    here, k = tl.program_id(0) // SIZE, tl.program_id(0) % SIZE
    width = tl.num_programs(0) // SIZE * CHUNK  # of a rank's words in a buffer
    e, before = tl.arange(0, CHUNK), -first
    for p in tl.static_range(len(parts)):
        piece, pieces = here - before, tl.cdiv(counts[p], CHUNK)
        if (piece >= 0) & (piece < pieces):
            RUNS: tl.constexpr = (BY_RUNS >> p) % 2 == 1
            at = here * CHUNK + e, piece * CHUNK + e, counts[p], runs[p]
            if k == 0:
                _send(pointers, parts[p], outs[p], rank, slot, num_words, width, at, RUNS, SIZE)
            else:
                _receive(pointers, outs[p], (rank + k) % SIZE, rank, slot, num_words, width, at, RUNS, SIZE)
        before += pieces
    empty_last(pointers, state, rank, slot_index, num_words, CHUNK, NUM)
    end(state, slot_index, slot, 0, NUM)


@triton.jit
def _send(pointers, part, out, rank, slot, num_words, width, at, RUNS: tl.constexpr, SIZE: tl.constexpr):
    """`at`: (index in the buffer's piece, index in the part, number of words of the part, length of its runs)."""
    place, e, count, run = at
    x = sendable(tl.load(part + e, mask=e < count, other=0))
    tl.store(out + _gathered_index(e, tl.cast(rank, tl.int64), count, run, RUNS, SIZE), x, mask=e < count)
    for other in tl.static_range(SIZE - 1):
        peer = tl.cast((rank + 1 + other) % SIZE, tl.int64)
        tl.store(buffer(pointers, peer, slot, num_words, part) + rank * width + place, x, mask=e < count)


@triton.jit
def _receive(pointers, out, r, rank, slot, num_words, width, at, RUNS: tl.constexpr, SIZE: tl.constexpr):
    place, e, count, run = at
    received = buffer(pointers, rank, slot, num_words, out) + r * width + place
    x = wait(received, e < count)
    tl.debug_barrier()
    _empty(received, e < count)
    tl.store(out + _gathered_index(e, r.to(tl.int64), count, run, RUNS, SIZE), x, mask=e < count)


@triton.jit
def _gathered_index(e, r, count, run, RUNS: tl.constexpr, SIZE: tl.constexpr):
    """The index of word e of rank r in the gathered output."""
    return (e // run * SIZE + r) * run + e % run if RUNS else r * count + e


@triton.jit
def _empty(place, mask):
    if place.dtype.element_ty.primitive_bitwidth == 16:
        tl.store(place.to(tl.pointer_type(tl.int16)), tl.full(place.shape, -32768, tl.int16), mask=mask)
    else:
        tl.store(place.to(tl.pointer_type(tl.int32)), tl.full(place.shape, -0x7FFF8000, tl.int32), mask=mask)


def can_shard(buffers: Buffers, part: PartialSum) -> bool:
    """Whether rows [T, D] are supported."""
    num_rows, width = part.shape
    is_known = part.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return is_known and num_rows % buffers.size == 0 and width % 8 == 0 and width <= MAX_WIDTH


def add_rms_norm_sharded(
    buffers: Buffers,
    part: PartialSum,
    norm: Norm,
    quantized: Quantized | None = None,
    *,
    max_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, sum) of this rank's share, [T / ranks, D] each: `add_rms_norm` of the sum over ranks.

    `quantized`: filled with out as codes. `max_rows`: of all ranks' shares together, at a time.
    """
    (num_rows, width), size = part.shape, buffers.size
    room = max(1, buffers.num_words * 4 // (size * width * part.dtype.itemsize) // 16 * 16)  # of few kinds of numbers
    share = num_rows // size
    step = min(share, room, max(1, (max_rows or num_rows) // size))
    sent = _overlapped(buffers, part) if step == share else None
    new, options = new_rows(computed(part) if sent is None else sent)
    residual_OD, weight_D, eps = norm
    residual_OD = residual_OD if residual_OD.stride(-1) == 1 else residual_OD.contiguous()
    out_OD, sum_OD = new.new_empty(share, width), new.new_empty(share, width)
    data, scale = (out_OD, out_OD) if quantized is None else quantized
    for first in range(0, share, step):
        count = min(step, share - first)
        _reduce_scatter_norm[(count * (size if sent is None else 1),)](
            buffers.pointers,
            buffers.state,
            new,
            residual_OD,
            weight_D,
            out_OD,
            sum_OD,
            data,
            scale,
            buffers.rank,
            buffers.num_words,
            first,
            count,
            share,
            num_rows,
            width,
            residual_OD.stride(0),
            eps,
            0 if quantized is None else scale.stride(-1),
            SIZE=size,
            PIECE=min(_PIECE, max(128, triton.next_power_of_2(width))),
            QUANTIZE=quantized is not None,
            SENT=sent is not None,
            NUM=NUM_BUFFERS,
            **options,
            num_warps=4 if size == 2 else 8,  # what more ranks sent takes more registers
            **dependent_launch(new.device),
        )
    return out_OD, sum_OD


def _overlapped(buffers: Buffers, part: PartialSum) -> Tensor | None:
    """Compute a pending linear layer and send its rows to their ranks meanwhile; returns the product with this rank's
    rows. None if `part` is not suited."""
    if not isinstance(part, PendingLinear) or cuda_rows.refusal(part.x_TD, part.weight):
        return None
    share, num_bytes = part.shape[0] // buffers.size, math.prod(part.shape) * part.dtype.itemsize
    is_much = num_bytes // buffers.size * (buffers.size - 1) >= _MIN_SENT_BYTES
    if not is_much or share % cuda_rows.SAME_OWNER:
        return None
    to = cuda_rows.PeerBuffers(buffers.pointers, buffers.state, buffers.rank, buffers.num_words)
    return cuda_rows.fp8_linear(part.x_TD, part.weight, part.quantized, to=to)


def gather(buffers: Buffers, *parts: Tensor) -> list[Tensor]:
    """All ranks' rows [O, ...] of each part, concatenated, in one launch; with contiguous columns if the part
    `is_transposed`. A part is a multiple of 4 bytes. A word 0x80008000 becomes 0x80008001, on every rank."""
    size, transposed = buffers.size, [is_transposed(part) for part in parts]
    own = [(part.T if flips else part).contiguous() for part, flips in zip(parts, transposed, strict=True)]
    outs = [
        each.new_empty(len(each), size * each.shape[1]) if flips else each.new_empty(size * len(each), *each.shape[1:])
        for each, flips in zip(own, transposed, strict=True)
    ]
    words = tuple(each.view(-1).view(torch.int32) for each in own)
    counts, chunk = tuple(len(each) for each in words), _CHUNK_BYTES // 4
    pieces = sum(triton.cdiv(count, chunk) for count in counts)
    step = buffers.num_words // size // chunk
    for first in range(0, pieces, step):
        _gather[(min(step, pieces - first) * size,)](
            buffers.pointers,
            buffers.state,
            words,
            tuple(out.view(-1).view(torch.int32) for out in outs),
            counts,
            tuple(count // len(each) for count, each in zip(counts, own, strict=True)),
            buffers.rank,
            buffers.num_words,
            first,
            BY_RUNS=sum(flips << i for i, flips in enumerate(transposed)),
            SIZE=size,
            CHUNK=chunk,
            NUM=NUM_BUFFERS,
            num_warps=8,
            **dependent_launch(words[0].device),
        )
    return [out.T if flips else out for out, flips in zip(outs, transposed, strict=True)]
