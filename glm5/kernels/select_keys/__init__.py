"""Selection of each query's keys: the best by index score."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.groups import few_queries

TABLE = Table(
    __name__,
    triton=Impl("two launches", on="triton"),
    grouped=Impl(
        "few queries of each of many requests",
        on="cpu",
        when=lambda q_TJI, page_table_BN, end_T: few_queries(page_table_BN, end_T, q_TJI.shape[1]),
    ),
    tiled=Impl("scores by index_score's tiled, some queries at a time"),
    invariant=Impl("what a query selects depends on no other, bit for bit"),
    invariant_triton=Impl("the same on a GPU, a program a query", on="triton", module="triton_invariant"),
    reference=Impl("the definition"),
)


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
    impl: str = "auto",
) -> Tensor:
    """`top_k` of `index_score`, with its arguments, int32 [T, top_k], in bounded memory.

    `rotation`: (cos, sin) as in `rope`, to be applied to the first dimensions of queries; q may be mutated.
    `num_shares`: these queries are one of so many shares, and get the same results as in one call for all shares.
    Queries are scored some at a time, so that a prompt's [T, S] scores never exist at once. `grouped`: for few queries
    of each of many requests, on a CPU; `triton`: on a GPU, in two launches; `invariant_triton`: the same two launches
    with one program per query, whatever the batch; else `impl` is that of index_score. No gradient passes.
    """
    run = TABLE.module(impl, q_TJI, page_table_BN, end_T).select_keys
    where = page_table_BN, row_T, end_T
    return run(q_TJI, key_PZI, w_TJ, *where, top_k=top_k, scale=scale, rotation=rotation, num_shares=num_shares)
