"""Latent attention by Triton's kernel with a fixed number of splits and one tiling: a program has one query, so the
order of keys and of the merge does not depend on other queries."""

from typing import Any

import torch
from torch import Tensor

from glm5.kernels.dispatch import forward_only
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.sparse_mla import triton

_SHARES = 2  # of a query's keys: programs of a pass then fill a GPU
_QUERIES = 4096  # at a time, of which the last program merges the shares: more would be merged by another kernel


@forward_only("sparse_mla[invariant_triton]")
def sparse_mla(q_THL: Tensor, latent_PZL: Pool, keys_TK: Tensor | None, *where: Tensor, **options: Any):
    """As `reference.sparse_mla`, without gradients, for keys as `select_keys` gives them: ascending, then -1. Raises
    ValueError where `keys_TK` is None."""
    if keys_TK is None:
        raise ValueError("sparse_mla[invariant_triton] reads selections of one width: give keys_TK; got None")
    table_BN, row_T, end_T = where
    pieces = zip(*(each.split(_QUERIES) for each in (q_THL, keys_TK, row_T, end_T)), strict=True)
    found = [
        triton.sparse_mla(q, latent_PZL, keys, table_BN, row, end, num_shares=_SHARES, is_ascending=True, **options)
        for q, keys, row, end in pieces
    ]
    return found[0] if len(found) == 1 else tuple(torch.cat(parts) for parts in zip(*found, strict=True))
