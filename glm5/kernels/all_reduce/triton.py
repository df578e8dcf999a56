"""All-reduce over GPUs that write into each other's memory (triton_buffers.py), one launch each.

    one shot    every rank sends its rows to all others, which sum them: lowest latency, N times the bytes
    two shots   pieces of rows are sharded over ranks, which sum them and send the sums to all
    gather      all-gather of words

Programs of a launch wait for each other's data, so all must run at once: a grid has at most one program per
multiprocessor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.all_reduce.part import summed
from glm5.kernels.all_reduce.triton_buffers import (
    MAX_WIDTH,
    NUM_BUFFERS,
    Buffers,
    buffer,
    empty_last,
    end,
    finish,
    new_row,
    new_rows,
    sendable,
    wait,
    wait_sum,
)
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.kernels.row_codes import Quantized

PIECE = 1024  # elements summed by one rank in two shots
_CHUNK = 1024  # words cleared or gathered by a program at a time

Given = tuple[Tensor, Tensor, int, float]  # residual, weight, the residual's stride, eps


@triton.jit
def _one_shot(
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
    T,
    D,
    stride_r,
    eps,
    stride_b,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM: tl.constexpr,
):
    """SPLITS programs per row send a part each; the first of them sums."""
    slot_index = tl.load(state)
    slot = slot_index.to(tl.int64)
    t, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    part = split * (BLOCK_D // SPLITS) + tl.arange(0, BLOCK_D // SPLITS)
    x = sendable(tl.load(part_ptr + t * D + part, mask=part < D, other=0.0))
    for step in tl.static_range(1, SIZE):
        peer = (rank + step) % SIZE
        tl.store(buffer(pointers, peer, slot, num_words, part_ptr) + (rank * T + t) * D + part, x, mask=part < D)
    empty_last(pointers, state, rank, slot_index, num_words, CHUNK, NUM)
    if split == 0:
        d = tl.arange(0, BLOCK_D)
        own = sendable(tl.load(part_ptr + t * D + d, mask=d < D, other=0.0))
        residual, weight = own, own
        if NORM:
            residual = tl.load(residual_ptr + t * stride_r + d, mask=d < D, other=0.0)
            weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
        place = buffer(pointers, rank, slot, num_words, part_ptr) + t * D + d
        total = wait_sum(place, T * D, d < D, rank, own, SIZE, BLOCK_D).to(own.dtype)
        at = out_ptr, sum_ptr, codes_ptr, scale_ptr, stride_b
        finish(total, residual, weight, t, d, D, *at, eps, NORM, QUANTIZE)
    end(state, slot_index, slot, SIZE * T * D * (part_ptr.dtype.element_ty.primitive_bitwidth // 8) // 4 + 1, NUM)


@triton.jit
def _two_shot(
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
    T,
    D,
    stride_r,
    eps,
    stride_b,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    place_ptr=None,
):
    """Rank r owns every SIZE-th piece from r on. A program sends pieces, sums owned ones, sends the sums, finishes
    rows."""
    slot_index = tl.load(state)
    slot = slot_index.to(tl.int64)
    program, programs = tl.program_id(0), tl.num_programs(0)
    pieces_a_row = tl.cdiv(D, PIECE)
    pieces = T * pieces_a_row
    owned = tl.cdiv(pieces, SIZE)
    sums = SIZE * owned * PIECE  # offset of sums, after the parts
    e = tl.arange(0, PIECE)
    for index in range(program, pieces, programs):
        piece = (index + rank * owned) % pieces  # ranks begin with different owners
        t, d = (piece // pieces_a_row).to(tl.int64), (piece % pieces_a_row) * PIECE + e
        x = new_row(part_ptr, t, d, T, D, A, SHARED, place_ptr)
        place = buffer(pointers, piece % SIZE, slot, num_words, part_ptr) + (rank * owned + piece // SIZE) * PIECE
        tl.store(place + e, sendable(x), mask=d < D)
    empty_last(pointers, state, rank, slot_index, num_words, CHUNK, NUM)
    own = buffer(pointers, rank, slot, num_words, part_ptr)
    for index in range(program, owned, programs):
        piece = index * SIZE + rank
        if piece < pieces:
            d = (piece % pieces_a_row) * PIECE + e
            none = tl.zeros((PIECE,), part_ptr.dtype.element_ty)
            total = wait_sum(own + index * PIECE + e, owned * PIECE, d < D, -1, none, SIZE, PIECE)
            x = sendable(total.to(part_ptr.dtype.element_ty))
            for step in tl.static_range(SIZE):
                peer = (rank + step) % SIZE
                place = buffer(pointers, peer, slot, num_words, part_ptr) + sums + (piece // pieces_a_row) * D
                tl.store(place + d, x, mask=d < D)
    d = tl.arange(0, BLOCK_D)
    for row in range(program, T, programs):
        residual, weight = d, d
        if NORM:
            residual = tl.load(residual_ptr + row * stride_r + d, mask=d < D, other=0.0)
            weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
        x = wait(own + sums + row * D + d, d < D)
        at = out_ptr, sum_ptr, codes_ptr, scale_ptr, stride_b
        finish(x, residual, weight, row, d, D, *at, eps, NORM, QUANTIZE)
    end(state, slot_index, slot, (sums + T * D) * (part_ptr.dtype.element_ty.primitive_bitwidth // 8) // 4 + 1, NUM)


@triton.jit
def _gather(
    pointers,
    state,
    part_ptr,
    out_ptr,
    rank,
    num_words,
    count,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM: tl.constexpr,
):
    slot_index = tl.load(state)
    slot = slot_index.to(tl.int64)
    w = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = sendable(tl.load(part_ptr + w, mask=w < count, other=0))
    for step in tl.static_range(SIZE):
        peer = (rank + step) % SIZE
        tl.store(buffer(pointers, peer, slot, num_words, part_ptr) + rank * count + w, x, mask=w < count)
    empty_last(pointers, state, rank, slot_index, num_words, CHUNK, NUM)
    own = buffer(pointers, rank, slot, num_words, part_ptr)
    for r in tl.static_range(SIZE):
        tl.store(out_ptr + r * count + w, wait(own + r * count + w, w < count), mask=w < count)
    end(state, slot_index, slot, SIZE * count, NUM)


def fits(buffers: Buffers, part: Tensor | ExpertOutputs, num_rows: int, *, two_shot: bool) -> bool:
    """Whether `num_rows` rows of [T, D] fit the buffers and the grid."""
    if len(part.shape) != 2 or part.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    width, size, words_a = part.shape[1], buffers.size, part.dtype.itemsize / 4
    if two_shot:
        pieces = num_rows * -(-width // PIECE)
        count = size * -(-pieces // size) * PIECE + num_rows * width
    else:
        count = size * num_rows * width
        if num_rows > buffers.max_programs:
            return False
    return width % 8 == 0 and width <= MAX_WIDTH and count * words_a + 1 <= buffers.num_words


def one_shot(
    buffers: Buffers,
    part_TD: Tensor,
    norm: tuple[Tensor, Tensor, float] | None = None,
    splits: int | None = None,
    *,
    quantized: Quantized | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, sum): with `norm` (residual, weight, eps) those of `add_rms_norm`, else both the sum over ranks.

    `quantized`: filled with out as codes, of a norm.
    """
    part_TD = part_TD.contiguous()
    num_rows, width = part_TD.shape
    block = max(128, triton.next_power_of_2(width))
    out_TD, sum_TD, given = _outputs(part_TD, norm)
    if splits is None:
        splits = min(8, block // 128)
        while splits > 1 and splits * num_rows > buffers.max_programs:
            splits //= 2
    _one_shot[(num_rows * splits,)](
        buffers.pointers,
        buffers.state,
        part_TD,
        *given[:2],
        out_TD,
        sum_TD,
        *_codes(quantized, out_TD),
        buffers.rank,
        buffers.num_words,
        num_rows,
        width,
        *given[2:],
        0 if quantized is None else quantized[1].stride(-1),
        SIZE=buffers.size,
        SPLITS=splits,
        BLOCK_D=block,
        NORM=norm is not None,
        QUANTIZE=quantized is not None,
        CHUNK=_CHUNK,
        NUM=NUM_BUFFERS,
        num_warps=_num_warps(block),
    )
    return out_TD, sum_TD


def two_shot(
    buffers: Buffers,
    part: Tensor | ExpertOutputs,
    norm: tuple[Tensor, Tensor, float] | None = None,
    programs: int | None = None,
    *,
    max_rows: int | None = None,
    quantized: Quantized | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, for more rows. `max_rows`: rows of a launch. In a single launch expert outputs are summed by the
    sender."""
    num_rows = part.shape[0]
    max_rows = max_rows or num_rows
    part = summed(part) if num_rows > max_rows else part
    out_TD, sum_TD, given = _outputs(part, norm)
    for first in range(0, num_rows, max_rows):
        span = slice(first, first + max_rows)
        outputs = out_TD[span], sum_TD[span], None if quantized is None else (quantized[0][span], quantized[1][span])
        some = part if isinstance(part, ExpertOutputs) else part[span]
        _two_shot_of(buffers, some, outputs, (given[0][span], *given[1:]), norm, programs)
    return out_TD, sum_TD


def _two_shot_of(
    buffers: Buffers,
    part: Tensor | ExpertOutputs,
    outputs: tuple[Tensor, Tensor, Quantized | None],
    given: Given,
    norm: object,
    programs: int | None,
) -> None:
    (num_rows, width), (out_TD, sum_TD, quantized) = part.shape, outputs
    new, options = new_rows(part)
    block = max(128, triton.next_power_of_2(width))
    pieces = num_rows * triton.cdiv(width, PIECE)
    _two_shot[(min(programs or buffers.max_programs, pieces),)](
        buffers.pointers,
        buffers.state,
        new,
        *given[:2],
        out_TD,
        sum_TD,
        *_codes(quantized, out_TD),
        buffers.rank,
        buffers.num_words,
        num_rows,
        width,
        *given[2:],
        0 if quantized is None else quantized[1].stride(-1),
        SIZE=buffers.size,
        BLOCK_D=block,
        PIECE=PIECE,
        NORM=norm is not None,
        QUANTIZE=quantized is not None,
        CHUNK=_CHUNK,
        NUM=NUM_BUFFERS,
        **options,
        num_warps=_num_warps(block),
    )


def gather(buffers: Buffers, part: Tensor) -> Tensor | None:
    """[ranks, ...] of a part of a multiple of 4 bytes; None if it is too large. A word 0x80008000 becomes 0x80008001,
    on every rank."""
    words = part.contiguous().view(-1).view(torch.int32)
    count = len(words)
    programs = triton.cdiv(count, _CHUNK)
    if buffers.size * count > buffers.num_words or programs > buffers.max_programs:
        return None
    out = torch.empty((buffers.size, *part.shape), dtype=part.dtype, device=part.device)
    _gather[(programs,)](
        buffers.pointers,
        buffers.state,
        words,
        out.view(-1).view(torch.int32),
        buffers.rank,
        buffers.num_words,
        count,
        SIZE=buffers.size,
        CHUNK=_CHUNK,
        NUM=NUM_BUFFERS,
        num_warps=4,
    )
    return out


def _outputs(part: Tensor | ExpertOutputs, norm: tuple[Tensor, Tensor, float] | None) -> tuple[Tensor, Tensor, Given]:
    """(out, sum, the kernel's arguments for `norm`)."""
    some = part.y if isinstance(part, ExpertOutputs) else part
    out_TD = some.new_empty(part.shape)
    if norm is None:
        return out_TD, out_TD, (some, some, 0, 0.0)
    residual_TD, weight_D, eps = norm
    residual_TD = residual_TD if residual_TD.stride(-1) == 1 else residual_TD.contiguous()
    return out_TD, torch.empty_like(out_TD), (residual_TD, weight_D, residual_TD.stride(0), eps)


def _codes(quantized: Quantized | None, anything: Tensor) -> Quantized:
    return (anything, anything) if quantized is None else quantized


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))
