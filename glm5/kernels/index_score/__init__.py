"""Lightning-indexer scores over paged keys."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.fp8_pool import Pool

TABLE = Table(
    __name__,
    triton=Impl("nothing of size T x J x S exists", on="triton", gradient=False),
    tiled=Impl("products of a tile stay in cache"),
    invariant=Impl("one query and one page at a time: a score depends on no other, bit for bit"),
    reference=Impl("the definition"),
)


def index_score(
    q_TJI: Tensor,
    key_PZI: Pool,
    w_TJ: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    impl: str = "auto",
) -> Tensor:
    """score[t, s] = sum_j w[t, j] relu((q[t, j] . key[s]) scale), -inf where s >= end_T[t] (model spec 3.4).

    Returns [T, S] in float32 (float64 for float64 queries), differentiable in q, key and w, except over FP8 keys.
    `invariant`: a score depends on its query and key alone, bit for bit; no gradient. `triton`: on a GPU, up to
    float32; no gradient.
    """
    run = TABLE.module(impl, q_TJI, w_TJ, key_PZI).index_score
    return run(q_TJI, key_PZI, w_TJ, page_table_BN, row_T, end_T, scale=scale)
