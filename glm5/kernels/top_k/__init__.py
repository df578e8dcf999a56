"""Deterministic selection of the k best keys."""

from typing import Literal

from torch import Tensor

from glm5.kernels import triton_support
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.top_k.partition import top_k as _partition
from glm5.kernels.top_k.reference import top_k as _reference

_LONG_ROW = 64  # keys for each key wanted, from which on torch does so
_TRITON_ROW, _TRITON_K = 1 << 20, 1 << 14  # the longest row and the largest k for which the Triton kernel is meant


def top_k(score_TS: Tensor, k: int, *, impl: Literal["auto", "reference", "partition", "triton"] = "auto") -> Tensor:
    """The k best columns of each row by (larger score, then smaller index), int32 [T, k].

    They come in ascending index order, then -1 where fewer than k scores are above -inf; k may pass S. A NaN counts as
    larger than any number. No gradient passes. Raises ValueError for k < 1.
    """
    if k < 1:
        raise ValueError(f"top_k: k must be at least 1, got {k}")
    if impl == "auto" and triton_support.chosen(score_TS) and score_TS.shape[1] <= _TRITON_ROW and k <= _TRITON_K:
        impl = "triton"
    if impl == "auto":
        # torch.topk keeps k values at hand while it reads a row that is long enough: five times as fast there.
        is_long = score_TS.shape[1] >= _LONG_ROW * (k + 1)
        impl = "partition" if score_TS.device.type == "cpu" and not is_long else "reference"
    if impl == "reference":
        return _reference(score_TS, k)
    if impl == "partition":
        return _partition(score_TS, k)
    if impl == "triton":
        from glm5.kernels.top_k.triton import top_k as run

        return run(score_TS, k)
    raise unknown_impl("top_k", impl, ("reference", "partition", "triton"))
