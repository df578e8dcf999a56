"""select_keys by Triton's kernels with one program per query, whatever the batch."""

from typing import Any

from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.index_score.triton import tiling_for
from glm5.kernels.select_keys import triton


def select_keys(q_TJI: Tensor, key_PZI: Pool, *given: Tensor, num_shares: int = 1, **options: Any) -> Tensor:
    """As `reference.select_keys`: a query's scores are computed one page of keys at a time, independent of the
    batch."""
    tiling = tiling_for(many_queries=False, is_float32=q_TJI.element_size() > 2)
    return triton.select_keys(q_TJI, key_PZI, *given, tiling=tiling, num_shares=num_shares, **options)
