"""Few queries of each of many requests, as decoding has them, on a CPU: batched products over requests that are alike.

A group is G requests with n queries each and about as many keys: their pages are gathered once, and one batched product
does them all. NumPy plans, which takes a fraction of the time of tensors this small: of a step of a small model,
planning would be a good part.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.paging import read_pages

Ints = NDArray[np.int64]

_FEW = 16  # queries of a request, on average; more of them see too unlike numbers of keys (tiles.py cuts those)
_CACHED = 1 << 18  # elements of a group's largest intermediate: 1 MB in float32, about one core's L2
_LONGEST = 1 << 20  # elements of one request's, beyond which keys are better read in blocks (tiles.py)
_WASTED = 1 << 15  # elements computed in vain that cost less than another group


@dataclass(frozen=True)
class Group:
    """Queries `query_X`, n of each of the requests `row_G`; they see no key after their first `num_pages` pages.

    `whole`: these are all queries, in order.
    """

    query_X: Ints
    row_G: Ints
    num_pages: int
    whole: bool

    def of(self, per_query: Tensor) -> Tensor:
        """The group's rows of [T, ...]."""
        return per_query if self.whole else per_query.index_select(0, torch.from_numpy(self.query_X))

    def keys(self, pool_PZX: Pool, page_table_BN: Tensor) -> Tensor:
        """[G, num_pages * Z, X]: what the pool holds there, whoever may see it."""
        pages_GN = np.maximum(page_table_BN.numpy()[self.row_G, : self.num_pages], 0).astype(np.int64)
        keys_NZX = read_pages(pool_PZX, torch.from_numpy(pages_GN.ravel()))
        return keys_NZX.view(len(self.row_G), -1, pool_PZX.shape[-1])


def few_queries(page_table_BN: Tensor, end_T: Tensor, num_heads: int) -> bool:
    """Whether groups are the way to compute these queries: few of a request, not too many keys, in host memory."""
    num_queries, num_requests = len(end_T), len(page_table_BN)
    if end_T.device.type != "cpu" or num_queries >= _FEW * num_requests:
        return False
    num_keys = int(end_T.numpy().max(initial=0))
    return num_heads * num_keys * num_queries <= _LONGEST * num_requests


def plan_groups(row_T: Tensor, end_T: Tensor, page_size: int, num_heads: int) -> list[Group]:
    """Groups of all queries that see a key. Rows are tensors in host memory."""
    rows, ends = row_T.numpy(), end_T.numpy()
    if not len(rows):
        return []
    if rows[0] == rows[-1] and (rows == rows[0]).all():  # one request: nothing to sort
        num_pages = -(-int(ends.max()) // page_size)
        return [Group(np.arange(len(rows)), rows[:1].astype(np.int64), num_pages, whole=True)] if num_pages else []
    first = np.concatenate([[0], np.flatnonzero(rows[1:] != rows[:-1]) + 1])
    count = np.append(first[1:], len(rows)) - first
    num_pages = -(-np.maximum.reduceat(ends, first) // page_size)
    order = np.lexsort((num_pages, count))
    groups = _alike(order[num_pages[order] > 0].tolist(), count.tolist(), num_pages.tolist(), page_size * num_heads)
    return [_group(np.array(sorted(runs)), first, count, num_pages, rows) for runs in groups]


def _alike(order: list[int], count: list[int], num_pages: list[int], page_area: int) -> list[list[int]]:
    """Runs of queries in groups: as many queries each, and about as many pages."""
    groups: list[list[int]] = []
    last, used = -1, 0
    for run in order:
        area = count[run] * num_pages[run] * page_area
        padded = (len(groups[-1]) + 1) * area if groups else 0
        if groups and count[run] == count[last] and padded <= _CACHED and padded - used - area <= _WASTED:
            groups[-1].append(run)
            used += area
        else:
            groups.append([run])
            last, used = run, area
    return groups


def _group(runs: Ints, first: Ints, count: Ints, num_pages: Ints, rows: NDArray[np.int32]) -> Group:
    query_X = (first[runs][:, None] + np.arange(count[runs[0]])).ravel()
    whole = len(query_X) == len(rows)  # then they are in order, as runs are
    return Group(query_X, rows[first[runs]].astype(np.int64), int(num_pages[runs].max()), whole)
