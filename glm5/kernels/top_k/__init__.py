"""Deterministic selection of the k best keys."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

_LONG_ROW = 64  # keys per selected key, from which on torch uses a faster algorithm
_TRITON_ROW, _TRITON_K = 1 << 20, 1 << 14  # the longest row and the largest k for which the Triton kernel is meant

TABLE = Table(
    __name__,
    triton=Impl(
        "rows of up to a million keys",
        on="triton",
        when=lambda score_TS, k: score_TS.shape[1] <= _TRITON_ROW and k <= _TRITON_K,
        gradient=False,
    ),
    # torch.topk keeps k values at hand while it reads a row that is long enough: five times as fast there.
    partition=Impl(
        "NumPy's partition, for shorter rows",
        on="cpu",
        when=lambda score_TS, k: score_TS.shape[1] < _LONG_ROW * (k + 1),
    ),
    reference=Impl("the definition, by torch.topk"),
)


def top_k(score_TS: Tensor, k: int, *, impl: str = "auto") -> Tensor:
    """The k best columns of each row by (larger score, then smaller index), int32 [T, k].

    They come in ascending index order, then -1 where fewer than k scores are above -inf; k may pass S. A NaN counts as
    larger than any number. No gradient passes. Raises ValueError for k < 1.
    """
    if k < 1:
        raise ValueError(f"top_k: k must be at least 1, got {k}")
    return TABLE.module(impl, score_TS, k).top_k(score_TS, k)
