"""Paged test cases for the attention kernels: shuffled pages, ragged requests, NaN wherever no query may look."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

PAGE_SIZE = 4

# (queries, keys) per request, the queries being the last ones; then padding rows: they name request 0 and see nothing.
CASES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "one query, one key": ([(1, 1)], 0),
    "equal requests": ([(6, 6), (6, 6), (6, 6)], 0),
    "ragged packed": ([(5, 5), (1, 1), (9, 9)], 0),
    "exact pages": ([(8, 8), (4, 12)], 0),
    "chunked prefill beside decode": ([(1, 11), (1, 3), (7, 16), (1, 5)], 0),
    "decode with padding": ([(1, 9), (1, 1), (1, 14)], 3),
    "only padding": ([(0, 4)], 2),
    "nothing": ([(0, 4)], 0),
}


@dataclass(frozen=True)
class Where:
    """Whose each query is and what it sees; `logical` turns a pool into one list of key rows per request."""

    page_table_BN: Tensor
    row_T: Tensor
    end_T: Tensor
    num_pages: int

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.page_table_BN, self.row_T, self.end_T

    @property
    def num_queries(self) -> int:
        return len(self.row_T)

    @property
    def num_keys(self) -> int:
        """S: logical keys of the page table, visible or not."""
        return self.page_table_BN.shape[1] * PAGE_SIZE

    def logical(self, pool_PZX: Tensor) -> list[np.ndarray]:
        """Keys of each request, float64 [S, X], read one by one."""
        pool = pool_PZX.detach().double().numpy()
        return [
            np.stack([pool[int(row[s // PAGE_SIZE]), s % PAGE_SIZE] for s in range(self.num_keys)])
            for row in self.page_table_BN
        ]

    def hidden(self) -> Tensor:
        """bool [T, S]: beyond the query's end."""
        return torch.arange(self.num_keys) >= self.end_T[:, None]

    def contiguous(self, pool_PZX: Tensor) -> tuple["Where", Tensor]:
        """The same case with every request's pages in order, and the pool to go with it."""
        num_rows, num_pages = self.page_table_BN.shape
        table = torch.arange(num_rows * num_pages, dtype=torch.int32).view(num_rows, num_pages)
        pool = pool_PZX.detach()[self.page_table_BN.long()].flatten(0, 1)
        return replace(self, page_table_BN=table, num_pages=num_rows * num_pages), pool


def make_where(name: str, gen: torch.Generator) -> Where:
    """The named case, its pages shuffled over a pool with spare ones; unused table entries point anywhere."""
    requests, num_padding = CASES[name]
    pages_of = [-(-keys // PAGE_SIZE) for _, keys in requests]
    num_pages = sum(pages_of) + 3
    order = torch.randperm(num_pages, generator=gen).int()
    table = torch.randint(num_pages, (len(requests), max(pages_of) + 1), generator=gen, dtype=torch.int32)
    first = 0
    for row, count in enumerate(pages_of):
        table[row, :count] = order[first : first + count]
        first += count
    rows = [row for row, (queries, _) in enumerate(requests) for _ in range(queries)]
    ends = [keys - queries + i + 1 for queries, keys in requests for i in range(queries)]
    return Where(
        table,
        torch.tensor(rows + [0] * num_padding, dtype=torch.int32),
        torch.tensor(ends + [0] * num_padding, dtype=torch.int32),
        num_pages,
    )


def make_pool(where: Where, width: int, gen: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Random keys [P, Z, width] in every slot that a query sees, NaN in all others."""
    pool = torch.full((where.num_pages, PAGE_SIZE, width), float("nan"), dtype=dtype)
    for row, end in zip(where.row_T.tolist(), where.end_T.tolist(), strict=True):
        for s in range(end):
            slot = pool[int(where.page_table_BN[row, s // PAGE_SIZE]), s % PAGE_SIZE]
            if slot.isnan().any():
                slot.copy_(torch.randn(width, generator=gen, dtype=torch.float64))
    return pool


def make_keys(where: Where, k: int, gen: torch.Generator) -> Tensor:
    """A selection as top_k returns it, and harder: distinct keys, some beyond the end, then -1. int32 [T, K]."""
    keys = torch.full((where.num_queries, k), -1, dtype=torch.int32)
    for t, end in enumerate(where.end_T.tolist()):
        context_bucket = min(where.num_keys, end + 2)
        chosen = torch.randperm(context_bucket, generator=gen)[: min(k, max(1, context_bucket - 1))].sort().values
        keys[t, : len(chosen)] = chosen.int()
    return keys
