"""Lightning-indexer scores over paged keys."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.index_score.reference import index_score as _reference


def index_score(
    q_TJI: Tensor,
    key_PZI: Tensor,
    w_TJ: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    impl: Literal["auto", "reference"] = "auto",
) -> Tensor:
    """score[t, s] = sum_j w[t, j] relu((q[t, j] . key[s]) scale), -inf where s >= end_T[t] (model spec 3.4).

    Returns [T, S] in float32 (float64 for float64 queries), differentiable in q, key and w.
    """
    if impl in ("auto", "reference"):
        return _reference(q_TJI, key_PZI, w_TJ, page_table_BN, row_T, end_T, scale=scale)
    raise unknown_impl("index_score", impl, ("reference",))
