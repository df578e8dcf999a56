"""Lightning-indexer scores over paged keys."""

from typing import Literal

from torch import Tensor

from glm5.kernels import triton_support
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.index_score.invariant import index_score as _invariant
from glm5.kernels.index_score.reference import index_score as _reference
from glm5.kernels.index_score.tiled import index_score as _tiled


def index_score(
    q_TJI: Tensor,
    key_PZI: Pool,
    w_TJ: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    impl: Literal["auto", "reference", "tiled", "invariant", "triton"] = "auto",
) -> Tensor:
    """score[t, s] = sum_j w[t, j] relu((q[t, j] . key[s]) scale), -inf where s >= end_T[t] (model spec 3.4).

    Returns [T, S] in float32 (float64 for float64 queries), differentiable in q, key and w, except over FP8 keys.
    `invariant`: a score depends on its query and key alone, bit for bit; no gradient. `triton`: on a GPU, up to
    float32; no gradient.
    """
    if impl == "auto":
        pools = () if isinstance(key_PZI, tuple) else (key_PZI,)
        impl = "triton" if triton_support.chosen(q_TJI, w_TJ, *pools) else "tiled"
    if impl == "tiled":
        run = _tiled
    elif impl == "reference":
        run = _reference
    elif impl == "invariant":
        run = _invariant
    elif impl == "triton":
        from glm5.kernels.index_score.triton import index_score as run
    else:
        raise unknown_impl("index_score", impl, ("reference", "tiled", "invariant", "triton"))
    return run(q_TJI, key_PZI, w_TJ, page_table_BN, row_T, end_T, scale=scale)
