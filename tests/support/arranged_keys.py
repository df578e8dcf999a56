"""Queries over paged keys, arranged anew at every call: in which order they come, in which pages and rows of the table
what they read lies. What an `invariant` kernel makes of a query must not show any of it."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glm5.kernels.fp8_pool import LatentFormat
from glm5.kernels.index_score import index_score
from glm5.kernels.invariant import PASS_ROWS
from glm5.kernels.select_keys import select_keys
from glm5.kernels.sparse_mla import sparse_mla
from tests.unit.kernels.test_pools import fp8_keys, fp8_latents

PAGE, NUM_REQUESTS, SCALE = 64, 5, 0.3
Layout = Literal["plain", "fp8"]


class Sizes(NamedTuple):
    """Index heads and their width, heads, values and rotated part of a latent, keys selected; pages of a request."""

    J: int = 5
    I: int = 12
    H: int = 3
    C: int = 12
    R: int = 8
    K: int = 50
    pages: int = 4


class Paged:
    """Keys of requests in pages anywhere; queries of any of them, each seeing any number of keys."""

    def __init__(
        self,
        gen: torch.Generator,
        dtype: torch.dtype,
        sizes: Sizes | None = None,
        *,
        device: str = "cpu",
        layout: Layout = "plain",
        num_queries: int = PASS_ROWS,
    ):
        self.gen, self.dtype, self.device, self.layout = gen, dtype, device, layout
        self.sizes = sizes = sizes or Sizes()
        self.num_queries, self.num_keys = num_queries, sizes.pages * PAGE
        self.keys = torch.randn(NUM_REQUESTS, self.num_keys, max(sizes.C + sizes.R, sizes.I), generator=gen).to(dtype)
        self.request_T = torch.randint(NUM_REQUESTS, (num_queries,), generator=gen)
        self.end_T = torch.randint(self.num_keys + 1, (num_queries,), generator=gen).int()
        shapes = [(sizes.J, sizes.I), (sizes.J,), (sizes.H, sizes.C + sizes.R)]
        self.q_TJI, self.w_TJ, self.q_THL = (
            torch.randn(num_queries, *shape, generator=gen).to(dtype) for shape in shapes
        )

    def arranged(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """A pool of the first values of keys, a page table into it and the row of that table of each request; other
        values each time."""
        gen, pages = self.gen, self.sizes.pages
        columns = pages + int(torch.randint(3, (), generator=gen))
        num_pages = NUM_REQUESTS * pages + 3
        order_P, row_B = torch.randperm(num_pages, generator=gen), torch.randperm(NUM_REQUESTS, generator=gen)
        table_BP = torch.randint(num_pages, (NUM_REQUESTS, columns), generator=gen).int()
        pool_PZL = torch.full((num_pages, PAGE, width), float("nan"), dtype=self.dtype)
        for request, row in enumerate(row_B.tolist()):
            own = order_P[request * pages : (request + 1) * pages]
            pool_PZL[own] = self.keys[request, :, :width].unflatten(0, (pages, PAGE))
            table_BP[row, :pages] = own.int()
        return pool_PZL, table_BP, row_B.int()

    def scores(self, order_T: Tensor, impl) -> Tensor:
        """Scores [T, keys] of the queries in some order, in some arrangement; back in their own order."""
        pool, table, row_B = self.arranged(self.sizes.I)
        args = self.q_TJI[order_T], pool, self.w_TJ[order_T], table, row_B[self.request_T[order_T]]
        score = index_score(*args, self.end_T[order_T], scale=SCALE, impl=impl)
        return back(score[:, : self.num_keys], order_T)

    def selection(self, order_T: Tensor, impl) -> Tensor:
        """Selected keys [T, K]; likewise."""
        pool, table, row_B = self.arranged(self.sizes.I)
        key_PZI = fp8_keys(pool.nan_to_num().float()) if self.layout == "fp8" else pool
        args = self.q_TJI[order_T], key_PZI, self.w_TJ[order_T], table, row_B[self.request_T[order_T]]
        args = (self._moved(each) for each in (*args, self.end_T[order_T]))
        return back(select_keys(*args, top_k=self.sizes.K, scale=SCALE, impl=impl).cpu(), order_T)

    def attention(self, keys_TK: Tensor, order_T: Tensor, impl) -> tuple[Tensor, Tensor]:
        form = LatentFormat(self.sizes.C, self.sizes.R)
        pool, table, row_B = self.arranged(self.sizes.C + self.sizes.R)
        latent_PZL = fp8_latents(pool.nan_to_num().float(), form) if self.layout == "fp8" else pool
        args = self.q_THL[order_T], latent_PZL, keys_TK[order_T], table, row_B[self.request_T[order_T]]
        args = (self._moved(each) for each in (*args, self.end_T[order_T]))
        out, lse = sparse_mla(*args, scale=SCALE, value_dim=self.sizes.C, impl=impl)
        return back(out.cpu(), order_T), back(lse.cpu(), order_T)

    def shuffled(self, count: int | None = None) -> Tensor:
        """Some of the queries, or all, in any order."""
        return torch.randperm(self.num_queries, generator=self.gen)[:count]

    def _moved(self, x):
        if isinstance(x, tuple):
            return type(x)(*(part if isinstance(part, LatentFormat) else part.to(self.device) for part in x))
        return x.to(self.device)


def back(rows: Tensor, order_T: Tensor) -> Tensor:
    return rows[order_T.argsort()]
