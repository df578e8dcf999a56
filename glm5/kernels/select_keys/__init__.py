"""Which keys each query reads: the best by index score."""

from typing import Literal

from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.select_keys.reference import select_keys as _reference


def select_keys(
    q_TJI: Tensor,
    key_PZI: Pool,
    w_TJ: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    top_k: int,
    scale: float,
    impl: Literal["auto", "reference", "tiled", "invariant"] = "auto",
) -> Tensor:
    """`top_k` of `index_score` (which says what the arguments are), int32 [T, top_k], in bounded memory.

    Queries are scored some at a time, so that a prompt's [T, S] scores never exist at once. `impl` is that of
    index_score. No gradient passes.
    """
    return _reference(q_TJI, key_PZI, w_TJ, page_table_BN, row_T, end_T, top_k=top_k, scale=scale, impl=impl)
