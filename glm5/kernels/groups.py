"""Few queries of each of many requests, as decoding has them, on a CPU: batched products over requests that are alike.

A group is G requests with n queries each and about as many keys: their pages are gathered once, and one batched product
does them all. NumPy plans, which takes a fraction of the time of tensors this small; of a step of a small model,
planning would be a good part, so that one plan serves all layers of a step.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.paging import EveryRow, read_pages, read_rows

Ints = NDArray[np.int64]

_FEW = 16  # queries of a request, on average; more of them see too unlike numbers of keys (tiles.py cuts those)
_CACHED = 1 << 18  # elements of a group's largest intermediate: 1 MB in float32, about one core's L2
_LONGEST = 1 << 20  # elements of one request's, beyond which keys are better read in blocks (tiles.py)
_SHORT = 16  # pages of a request, of which all keys are looked up sooner than some
_WASTED = 1 << 15  # elements computed in vain that cost less than another group


@dataclass(frozen=True)
class Group:
    """Queries `query_X`, n of each of the requests `row_G`; they see keys up to `end_X`, on `num_pages` pages.

    `whole`: these are all queries, in order. `page_N`: the pages of one request after the other.
    """

    query_X: Ints
    row_G: Ints
    end_X: NDArray[np.int32]
    num_pages: int
    whole: bool
    page_N: Tensor

    @cached_property
    def num_keys(self) -> int:
        """No query sees more."""
        return int(self.end_X.max())

    @cached_property
    def num_seen(self) -> int:
        """No query sees less."""
        return int(self.end_X.min())

    @cached_property
    def hidden(self) -> NDArray[np.bool_] | None:
        """Which of the keys a query does not see, [X, num_keys]; None where all see all."""
        if self.num_seen == self.num_keys:
            return None
        return np.arange(self.num_keys, dtype=np.int32) >= self.end_X[:, None]

    @cached_property
    def beyond(self) -> Tensor | None:
        """Which of the keys no query of a request sees, [G, num_keys]; None where there are none."""
        end_G = self.end_X.reshape(len(self.row_G), -1).max(axis=1)
        if (end_G == self.num_keys).all():
            return None
        return torch.from_numpy(np.arange(self.num_keys, dtype=np.int32) >= end_G[:, None])

    def of(self, per_query: Tensor) -> Tensor:
        """The group's rows of [T, ...]."""
        return per_query if self.whole else per_query.index_select(0, torch.from_numpy(self.query_X))

    def keys(self, pool_PZX: Pool) -> Tensor:
        """[G, num_keys, X]: the pool's values there, masked or not."""
        keys_NZX = read_pages(pool_PZX, self.page_N)
        return keys_NZX.view(len(self.row_G), -1, pool_PZX.shape[-1])[:, : self.num_keys]


class FewQueries:
    """Whose the queries are and what they see, from tensors in host memory that stay as they are."""

    def __init__(self, page_table_BN: Tensor, row_T: Tensor, end_T: Tensor, page_size: int):
        # Entries past a request's pages may be anything.
        self.table_BN = np.maximum(page_table_BN.numpy(), 0).astype(np.int64)
        self.rows, self.ends, self.page_size = row_T.numpy(), end_T.numpy(), page_size
        self._groups: dict[int, list[Group]] = {}
        self._index: tuple[Tensor, tuple[int, int], Tensor] | None = None
        self._all_places: tuple[tuple[int, int], Ints] | None = None
        self._hidden: tuple[Tensor, NDArray[np.bool_] | None] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def groups(self, num_heads: int) -> list[Group]:
        """Groups of all queries that see a key."""
        if num_heads not in self._groups:
            self._groups[num_heads] = self._plan(num_heads)
        return self._groups[num_heads]

    def hidden(self, keys_TK: Tensor) -> NDArray[np.bool_] | None:
        """Which of these keys are none or are not seen; None where all are."""
        if self._hidden is None or self._hidden[0] is not keys_TK:  # layers share selections
            keys = keys_TK.numpy()
            hidden_TK = (keys < 0) | (keys >= self.ends[:, None])
            self._hidden = keys_TK, hidden_TK if hidden_TK.any() else None
        return self._hidden[1]

    def note_all_seen(self, keys_TK: Tensor) -> None:
        """Every one of these keys is a key, and is seen."""
        self._hidden = keys_TK, None

    def read(self, pool_PZX: Pool | EveryRow, keys_TK: Tensor, part: slice | None = None) -> Tensor:
        """[T, K, X]: the rows of these keys, of a part of the queries; of hidden ones, that of the request's key 0."""
        every = EveryRow.of(pool_PZX) if isinstance(pool_PZX, Tensor) else pool_PZX
        if isinstance(every, EveryRow):
            index_TK = self._slots(keys_TK, every.page_step, every.row_step)
        else:
            index_TK = self._slots(keys_TK, self.page_size, 1)
        if part is not None:
            index_TK = index_TK[part]
        if not isinstance(every, EveryRow):
            return read_rows(every, index_TK)
        return every.view_GX.index_select(0, index_TK.view(-1)).view(*index_TK.shape, -1)

    def _slots(self, keys_TK: Tensor, page_step: int, row_step: int) -> Tensor:
        """page * page_step + offset * row_step, int64 [T, K]."""
        steps = page_step, row_step
        if self._index is None or self._index[0] is not keys_TK or self._index[1] != steps:
            keys, hidden_TK = keys_TK.numpy(), self.hidden(keys_TK)
            if hidden_TK is not None:
                keys = np.where(hidden_TK, 0, keys)
            self._index = keys_TK, steps, torch.from_numpy(self._places(keys, page_step, row_step))
        return self._index[2]

    def _places(self, keys: NDArray[np.int32], page_step: int, row_step: int) -> Ints:
        num_pages = self.table_BN.shape[1]
        if num_pages > _SHORT:
            columns = keys // self.page_size
            places = self.table_BN[self.rows[:, None], columns] * page_step
            places += (keys - columns * self.page_size) * row_step
            return places
        # Of short contexts the places of all keys are known once and for all layers.
        if self._all_places is None or self._all_places[0] != (page_step, row_step):
            offset_Z = np.arange(self.page_size) * row_step
            places_BS = (self.table_BN[:, :, None] * page_step + offset_Z).reshape(len(self.table_BN), -1)
            self._all_places = (page_step, row_step), places_BS
        return self._all_places[1][self.rows[:, None], keys]

    def _plan(self, num_heads: int) -> list[Group]:
        rows, ends = self.rows, self.ends
        if not len(rows):
            return []
        if rows[0] == rows[-1] and (rows == rows[0]).all():  # one request: nothing to sort
            return [self._group(np.arange(len(rows)), rows[:1])] if ends.any() else []
        first = np.concatenate([[0], np.flatnonzero(rows[1:] != rows[:-1]) + 1])
        count = np.append(first[1:], len(rows)) - first
        num_pages = -(-np.maximum.reduceat(ends, first) // self.page_size)
        order = np.lexsort((num_pages, count))
        order = order[num_pages[order] > 0].tolist()
        return [
            self._group((first[runs][:, None] + np.arange(int(count[runs[0]]))).ravel(), rows[first[runs]])
            for runs in _alike(order, count.tolist(), num_pages.tolist(), self.page_size * num_heads)
        ]

    def _group(self, query_X: Ints, row_G: NDArray[np.int32]) -> Group:
        end_X = self.ends[query_X]
        num_pages = -(-int(end_X.max()) // self.page_size)
        page_N = torch.from_numpy(self.table_BN[row_G, :num_pages].ravel())
        whole = len(query_X) == len(self)  # then they are in order, as runs are
        return Group(query_X, row_G.astype(np.int64), end_X, num_pages, whole, page_N)


def few_queries(page_table_BN: Tensor, end_T: Tensor, num_heads: int, num_keys: int | None = None) -> bool:
    """Whether groups are the way to compute these queries: few of a request, not too many keys, in host memory.

    `num_keys`: a number that no query sees more of, where it is known."""
    num_queries, num_requests = len(end_T), len(page_table_BN)
    if not end_T.is_cpu or num_queries >= _FEW * num_requests:
        return False
    if num_keys is None:
        num_keys = int(end_T.numpy().max(initial=0))
    return num_heads * num_keys * num_queries <= _LONGEST * num_requests


def _alike(order: list[int], count: list[int], num_pages: list[int], page_area: int) -> list[NDArray[np.int64]]:
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
    return [np.array(sorted(runs)) for runs in groups]
