"""Reading a page pool through a page table.

    slot(b, s) = page_table_BN[b, s // Z] * Z + s % Z        row slot % Z of page slot // Z

Offsets are int64 before any product: a pool of 1M tokens x 576 values passes 2**31. A pool [P, Z, .] may be a strided
slice of larger pages, and is never copied completely; FP8 rows are dequantized after gathering.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, Pool, dequantize_keys, dequantize_latents


def query_runs(row_T: Tensor) -> list[tuple[int, int, int]]:
    """Runs of consecutive queries of one request, as (request, start, stop) in query order."""
    rows, counts = torch.unique_consecutive(row_T, return_counts=True)
    stops = counts.cumsum(0).tolist()
    return [(row, stop - count, stop) for row, count, stop in zip(rows.tolist(), counts.tolist(), stops, strict=True)]


def key_slots(keys_TK: Tensor, page_table_BN: Tensor, row_T: Tensor, page_size: int) -> Tensor:
    """Slot, int64 [T, K], of each logical key. Keys must be valid (>= 0)."""
    keys_TK = keys_TK.long()
    pages_TK = page_table_BN[row_T.long()[:, None], keys_TK // page_size].long()
    return pages_TK * page_size + keys_TK % page_size


def slots_or_none(
    keys_TK: Tensor, page_table_BN: Tensor, row_T: Tensor, end_T: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """(slot of each logical key, int32 [T, K], -1 if it is -1 or not visible; number of leading columns of each row
    that contain all of its slots, int32 [T])."""
    hidden_TK = (keys_TK < 0) | (keys_TK >= end_T[:, None])
    slot_TK = key_slots(keys_TK.masked_fill(hidden_TK, 0), page_table_BN, row_T, page_size)
    place_K = torch.arange(1, keys_TK.shape[1] + 1, dtype=torch.int32, device=keys_TK.device)
    count_T = place_K.expand(keys_TK.shape).masked_fill(hidden_TK, 0).amax(dim=1)
    return slot_TK.masked_fill_(hidden_TK, -1).int(), count_T


def read_pages(pool_PZX: Pool, pages_N: Tensor) -> Tensor:
    """Pages [N, Z, X] in the pool's dtype, FP8 ones in float32."""
    if isinstance(pool_PZX, Fp8Keys):
        data, scale = _as_bytes(pool_PZX.data).index_select(0, pages_N), pool_PZX.scale.index_select(0, pages_N)
        return dequantize_keys(data.view(FP8), scale)
    if isinstance(pool_PZX, Fp8Latents):
        return dequantize_latents(pool_PZX.row.index_select(0, pages_N), pool_PZX.format)
    return pool_PZX.index_select(0, pages_N)


def read_rows(pool_PZX: Pool, slots: Tensor) -> Tensor:
    """Rows [*slots.shape, X] by int64 slot, in the pool's dtype, FP8 ones in float32."""
    if isinstance(pool_PZX, Fp8Keys):
        data, scale = _rows(_as_bytes(pool_PZX.data), slots), _rows(pool_PZX.scale.unsqueeze(-1), slots)
        return dequantize_keys(data.view(FP8), scale.squeeze(-1))
    if isinstance(pool_PZX, Fp8Latents):
        return dequantize_latents(_rows(pool_PZX.row, slots), pool_PZX.format)
    return _rows(pool_PZX, slots)


def request_keys(pool_PZX: Pool, pages_N: Tensor, end: int) -> Tensor:
    """One request's keys in logical order, [S, X]; those at and after `end` are zeros, whatever the pool holds."""
    keys_SX = read_pages(pool_PZX, pages_N.long()).flatten(0, 1)
    hidden_S = torch.arange(keys_SX.shape[0], device=keys_SX.device) >= end
    return keys_SX.masked_fill(hidden_S[:, None], 0.0)


class EveryRow(NamedTuple):
    """A pool as one matrix of overlapping rows: the row of a slot is number page * `page_step` + offset * `row_step`.

    index_select takes whole rows (four times as fast on a CPU as indexing with slots), and only one index.
    """

    view_GX: Tensor
    page_step: int
    row_step: int

    @classmethod
    def of(cls, part_PZX: Tensor) -> "EveryRow":
        num_pages, page_size, width = part_PZX.shape
        page_stride, row_stride, _ = part_PZX.stride()
        step = math.gcd(page_stride, row_stride)
        reach = (num_pages - 1) * page_stride + (page_size - 1) * row_stride
        return cls(part_PZX.as_strided((reach // step + 1, width), (step, 1)), page_stride // step, row_stride // step)


def _rows(part_PZX: Tensor, slots: Tensor) -> Tensor:
    if part_PZX.requires_grad:
        return part_PZX.flatten(0, 1)[slots]
    page_size, width = part_PZX.shape[1:]
    every = EveryRow.of(part_PZX)
    index = slots * every.row_step
    if every.page_step != page_size * every.row_step:
        index += slots // page_size * (every.page_step - page_size * every.row_step)
    return every.view_GX.index_select(0, index.flatten()).view(*slots.shape, width)


def _as_bytes(data_fp8: Tensor) -> Tensor:
    """FP8 data as bytes, which torch can gather on every device."""
    return data_fp8.view(torch.uint8)
