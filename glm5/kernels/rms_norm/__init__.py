"""Root-mean-square norm."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.rms_norm.reference import rms_norm as _reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, impl: Literal["auto", "reference"] = "auto") -> Tensor:
    """`x` [..., D] over its root mean square along D, cast to x.dtype, times `weight` [D] (model spec 3.1)."""
    if impl in ("auto", "reference"):
        return _reference(x, weight, eps)
    raise unknown_impl("rms_norm", impl, ("reference",))
