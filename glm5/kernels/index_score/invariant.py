"""index_score in tiles of one shape: one query and one page of its request, a fixed number of tiles at a time.

A score is then a function of its query, its key and the key's place in its page, whatever else is in the batch and
wherever the page lies. Forward only.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.dispatch import forward_only
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.paging import read_pages

# Tiles at a time. On a CPU few: their products stay in cache, and few are left over where contexts are short.
_TILES_CPU, _TILES = 32, 512


@forward_only("index_score[invariant]")
def index_score(
    q_TJI: Tensor, key_PZI: Pool, w_TJ: Tensor, page_table_BN: Tensor, row_T: Tensor, end_T: Tensor, *, scale: float
) -> Tensor:
    """As `reference.index_score`, without gradients."""
    wide = torch.promote_types(q_TJI.dtype, torch.float32)
    num_queries, num_pages, page_size = q_TJI.shape[0], page_table_BN.shape[1], key_PZI.shape[1]
    assert scale > 0, f"{scale=}"  # relu lets a positive factor through, here to the weights
    q_TJI, w_TJ1 = q_TJI.to(wide), (w_TJ.to(wide) * scale).unsqueeze(-1)
    query_U, column_U = _tiles(end_T, num_pages, page_size)
    size = _TILES_CPU if end_T.device.type == "cpu" else _TILES
    filled = (0, -len(query_U) % size)  # the first tile again, as often as it takes
    query_U, column_U = F.pad(query_U, filled), F.pad(column_U, filled)
    page_U = page_table_BN[row_T[query_U].long(), column_U].long().clamp_min_(0)
    tiles = [q_TJI.new_empty(0, page_size)]
    for query_G, page_G in zip(query_U.split(size), page_U.split(size), strict=True):
        key_GZI = read_pages(key_PZI, page_G).to(wide)
        hits_GJZ = torch.bmm(q_TJI.index_select(0, query_G), key_GZI.mT).relu_()
        tiles.append(hits_GJZ.mul_(w_TJ1.index_select(0, query_G)).sum(dim=1))
    score_TNZ = q_TJI.new_full((num_queries, num_pages, page_size), float("-inf"))
    score_TNZ[query_U, column_U] = torch.cat(tiles)
    hidden_TS = torch.arange(num_pages * page_size, device=end_T.device) >= end_T[:, None]
    return score_TNZ.flatten(1).masked_fill_(hidden_TS, float("-inf"))


def _tiles(end_T: Tensor, num_pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Query and table column of each tile: of those with a visible key, or of all where counting would wait."""
    first_N = torch.arange(num_pages, device=end_T.device) * page_size
    if end_T.device.type == "cpu":
        query_U, column_U = (first_N < end_T[:, None]).nonzero(as_tuple=True)
        return query_U, column_U
    query_T = torch.arange(len(end_T), device=end_T.device)
    return query_T.repeat_interleave(num_pages), torch.arange(num_pages, device=end_T.device).repeat(len(end_T))
