"""Dense computation on paged keys in tiles that stay in cache.

A tile is n consecutive queries of each of G requests, and the first `num_keys` logical keys of those requests, as many
as the queries see. A long run of queries is split into several tiles, of which early ones skip late keys; short runs of
equal length, such as decoding requests, share one. Planning runs on the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.paging import query_runs, read_pages

_MIN_QUERIES = 32  # fewer rows starve the matmul
_MIN_KEYS = 128  # likewise
_MAX_QUERIES = 128  # of one request: with more, too many of them would be multiplied with keys they cannot see
_CACHED = 1 << 18  # elements of a tile's largest intermediate on a CPU: 1 MB in float32, about one core's L2
_BATCHED = 1 << 26  # the same elsewhere, where launches cost more than memory traffic


@dataclass
class Tile:
    """Packed queries `start` to `stop`: `rows` names their requests, each with (stop - start) / len(rows) queries."""

    start: int
    stop: int
    rows: list[int]
    ends: list[int]  # keys visible to any of the tile's queries, per request

    @property
    def queries(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def num_keys(self) -> int:
        return max(self.ends)

    @property
    def length(self) -> int:
        """Queries per request."""
        return (self.stop - self.start) // len(self.rows)


def plan_tiles(row_T: Tensor, end_T: Tensor, num_heads: int) -> list[Tile]:
    """Tiles that cover every query once, in order, except queries that see no key."""
    area = _area(row_T.device, num_heads)
    longest = _MAX_QUERIES if row_T.device.type == "cpu" else row_T.shape[0]
    ends, tiles = end_T.tolist(), []
    for row, start, stop in query_runs(row_T):
        step = min(max(_MIN_QUERIES, area // max(1, *ends[start:stop])), longest)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            end = max(ends[first:last])
            whole = last - first == stop - start  # parts of a run see unlike numbers of keys, and are not joined
            if end and not (whole and tiles and _join(tiles[-1], first, last, row, end, area)):
                tiles.append(Tile(first, last, [row], [end]))
    return tiles


def block_length(tile: Tile, num_heads: int, device: torch.device) -> int:
    """Keys to multiply the tile's queries with at a time, where that can be done in blocks."""
    return max(_MIN_KEYS, _area(device, num_heads) // (tile.stop - tile.start))


def _area(device: torch.device, num_heads: int) -> int:
    """Queries times keys of a tile."""
    return (_CACHED if device.type == "cpu" else _BATCHED) // num_heads


def _join(tile: Tile, first: int, last: int, row: int, end: int, area: int) -> bool:
    """Join a request's queries to the previous tile, if their number is equal and the tile stays small."""
    fits = (last - tile.start) * max(tile.num_keys, end) <= area
    if not fits or tile.stop != first or tile.length != last - first or tile.rows[-1] == row:
        return False
    tile.stop = last
    tile.rows.append(row)
    tile.ends.append(end)
    return True


class TileReader:
    """Reads a tile's keys from a pool, as a view if its pages are evenly spaced, and adds gradients back."""

    def __init__(self, page_table_BN: Tensor, page_size: int):
        self.page_size = page_size
        self._table_BN = page_table_BN.long().clamp_min(0)  # entries past a request's pages may be anything
        in_order = (self._table_BN.diff(dim=1) == 1).int().cumprod(dim=1).sum(dim=1) + 1
        self._in_order_B, self._first_B = in_order.tolist(), self._table_BN[:, :1].flatten().tolist()

    def read(self, pool_PZX: Pool, tile: Tile) -> Tensor:
        """[G, num_keys, X]; keys at and after a request's own end are zeros, whatever the pool holds."""
        return next(keys_GSX for _, keys_GSX in self.blocks(pool_PZX, tile, tile.num_keys))

    def blocks(self, pool_PZX: Pool, tile: Tile, length: int) -> Iterator[tuple[slice, Tensor]]:
        """As `read`, some `length` keys at a time: which they are, and [G, n, X]."""
        view = self._view(pool_PZX, tile)
        whole = view if min(tile.ends) == tile.num_keys else None
        if whole is None:  # whole pages are gathered
            length = -(-length // self.page_size) * self.page_size
        for first in range(0, tile.num_keys, length):
            last = min(first + length, tile.num_keys)
            if whole is not None:
                yield slice(first, last), whole[:, first:last]
                continue
            keys_GSX = self._gather(pool_PZX, tile, first, last) if view is None else view[:, first:last].clone()
            for keys_SX, end in zip(keys_GSX, tile.ends, strict=True):
                if end < last:
                    keys_SX[max(0, end - first) :] = 0.0
            yield slice(first, last), keys_GSX

    def add(self, pool_PZX: Tensor, tile: Tile, grad_GSX: Tensor) -> None:
        """pool[key] += grad[key]; rows at and after a request's own end must be zeros."""
        view = self._view(pool_PZX, tile)
        if view is not None:
            view += grad_GSX
            return
        ragged = -tile.num_keys % self.page_size
        pages_GZX = torch.nn.functional.pad(grad_GSX, (0, 0, 0, ragged)).reshape(-1, *pool_PZX.shape[1:])
        pool_PZX.index_add_(0, self._pages(tile, 0, tile.num_keys), pages_GZX)

    def _pages(self, tile: Tile, first: int, last: int) -> Tensor:
        """The pages of keys `first` (of a page) to `last`, of one request after the other."""
        rows = torch.tensor(tile.rows, device=self._table_BN.device)
        return self._table_BN[rows, first // self.page_size : -(-last // self.page_size)].flatten()

    def _gather(self, pool_PZX: Pool, tile: Tile, first: int, last: int) -> Tensor:
        pages_GZX = read_pages(pool_PZX, self._pages(tile, first, last))
        return pages_GZX.view(len(tile.rows), -1, pool_PZX.shape[-1])[:, : last - first]

    def _view(self, pool_PZX: Pool, tile: Tile) -> Tensor | None:
        """The keys in place, if each request's pages are in order and the requests' first pages evenly spaced."""
        if not isinstance(pool_PZX, Tensor):
            return None
        page_stride, row_stride, column_stride = pool_PZX.stride()
        num_pages = -(-tile.num_keys // self.page_size)
        # In a pool that is strided by page, the keys of one page are in place, those of two are not.
        if num_pages > 1 and page_stride != self.page_size * row_stride:
            return None
        if min(self._in_order_B[row] for row in tile.rows) < num_pages:
            return None
        first = [self._first_B[row] for row in tile.rows]
        apart = first[1] - first[0] if len(first) > 1 else num_pages
        # Closer together, requests would share pages, and an addition in place would lose one of two addends.
        if apart < num_pages or first != [first[0] + g * apart for g in range(len(first))]:
            return None
        shape = (len(first), tile.num_keys, pool_PZX.shape[-1])
        strides = (apart * page_stride, row_stride, column_stride)
        return pool_PZX.as_strided(shape, strides, pool_PZX.storage_offset() + first[0] * page_stride)


def dense_logits(q_THX: Tensor, keys_GSX: Tensor, scale: float) -> Tensor:
    """q . key * scale of a tile's queries with all of the tile's keys, [T, H, S]."""
    num_requests, num_keys, width = keys_GSX.shape
    q_GQX = q_THX.reshape(num_requests, -1, width)
    # beta=0: the first argument is not read. alpha costs nothing, where a multiplication would be one more pass.
    logits_GQS = torch.baddbmm(q_THX.new_zeros(1, 1, 1), q_GQX, keys_GSX.mT, beta=0, alpha=scale)
    return logits_GQS.view(*q_THX.shape[:2], num_keys)
