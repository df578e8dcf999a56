"""The likeliest token of each row of logits."""

from typing import Literal

from torch import Tensor

from glm5.kernels.best_token.reference import best_token as _reference
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.triton_support import chosen


def best_token(logits_RW: Tensor, *, impl: Literal["auto", "reference", "triton"] = "auto") -> tuple[Tensor, Tensor]:
    """(token [R] int64, the first of equals; whether there is none, as all are barred or one is no number, bool)."""
    if impl == "auto":
        impl = "triton" if chosen(logits_RW) else "reference"
    if impl == "reference":
        return _reference(logits_RW)
    if impl == "triton":
        from glm5.kernels.best_token.triton import best_token as run

        return run(logits_RW)
    raise unknown_impl("best_token", impl, ("reference", "triton"))
