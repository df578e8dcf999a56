"""Which keys each query reads: the best by index score."""

from typing import Literal

from torch import Tensor

from glm5.kernels import triton_support
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.groups import few_queries
from glm5.kernels.rope import rope_part
from glm5.kernels.select_keys.grouped import select_keys as _grouped
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
    rotation: tuple[Tensor, Tensor] | None = None,
    num_shares: int = 1,
    impl: Literal["auto", "reference", "tiled", "grouped", "invariant", "triton"] = "auto",
) -> Tensor:
    """`top_k` of `index_score` (which says what the arguments are), int32 [T, top_k], in bounded memory.

    `rotation`: (cos, sin) as in `rope`: the first dimensions of queries are yet to be rotated; q is then given away.
    `num_shares`: these are one of so many shares of queries, and are scored as all of them would be.
    Queries are scored some at a time, so that a prompt's [T, S] scores never exist at once. `grouped`: for few queries
    of each of many requests, on a CPU; `triton`: on a GPU, in two launches; else `impl` is that of index_score. On a
    GPU `invariant` takes the same two launches with a program a query, whatever else there is. No gradient passes.
    """
    is_fused = impl in ("auto", "invariant") and triton_support.chosen(q_TJI.detach())
    if is_fused or impl == "triton":
        from glm5.kernels.index_score.triton import tiling_of
        from glm5.kernels.select_keys.triton import lone_queries
        from glm5.kernels.select_keys.triton import select_keys as run

        where, tiling = (page_table_BN, row_T, end_T), tiling_of(q_TJI, key_PZI, page_table_BN, num_shares)
        tiling = lone_queries(q_TJI) if impl == "invariant" else tiling
        return run(q_TJI, key_PZI, w_TJ, *where, top_k=top_k, scale=scale, rotation=rotation, tiling=tiling)
    if rotation is not None:
        q_TJI = rope_part(q_TJI, *rotation, None, 0, 2 * rotation[0].shape[1])
    if impl == "auto" and few_queries(page_table_BN, end_T, q_TJI.shape[1]):
        impl = "grouped"
    if impl == "grouped":
        return _grouped(q_TJI, key_PZI, w_TJ, page_table_BN, row_T, end_T, top_k=top_k, scale=scale)
    return _reference(q_TJI, key_PZI, w_TJ, page_table_BN, row_T, end_T, top_k=top_k, scale=scale, impl=impl)
