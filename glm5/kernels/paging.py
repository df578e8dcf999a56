"""Reading a page pool through a page table.

    slot(b, s) = page_table_BN[b, s // Z] * Z + s % Z        a row of the pool seen as [P * Z, .]

Offsets are int64 before any product: a pool of 1M tokens x 576 values passes 2**31.
"""

import torch
from torch import Tensor


def query_runs(row_T: Tensor) -> list[tuple[int, int, int]]:
    """Stretches of consecutive queries of one request, as (request, start, stop) in query order."""
    rows, counts = torch.unique_consecutive(row_T, return_counts=True)
    stops = counts.cumsum(0).tolist()
    return [(row, stop - count, stop) for row, count, stop in zip(rows.tolist(), counts.tolist(), stops, strict=True)]


def key_slots(keys_TK: Tensor, page_table_BN: Tensor, row_T: Tensor, page_size: int) -> Tensor:
    """Pool row, int64 [T, K], of each logical key. Keys must be valid (>= 0)."""
    keys_TK = keys_TK.long()
    pages_TK = page_table_BN[row_T.long()[:, None], keys_TK // page_size].long()
    return pages_TK * page_size + keys_TK % page_size


def request_keys(pool_PZX: Tensor, pages_N: Tensor, end: int) -> Tensor:
    """One request's keys in logical order, [S, X]; those at and after `end` are zeros, whatever the pool holds."""
    keys_SX = pool_PZX[pages_N.long()].flatten(0, 1)
    hidden_S = torch.arange(keys_SX.shape[0], device=keys_SX.device) >= end
    return keys_SX.masked_fill(hidden_S[:, None], 0.0)
