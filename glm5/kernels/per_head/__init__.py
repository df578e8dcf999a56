"""Products of every head with a matrix of its own: what absorption puts before and behind latent attention."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.per_head.reference import per_head as _reference


def per_head(x_THI: Tensor, w_HIO: Tensor, *, impl: Literal["auto", "reference"] = "auto") -> Tensor:
    """`x_THI` [T, H, I] by `w_HIO` [H, I, O]: [T, H, O] in x's dtype.

    The reference is the library's batched product, which no kernel tried here has beaten (docs/performance-tried.md).
    """
    if impl not in ("auto", "reference"):
        raise unknown_impl("per_head", impl, ("reference",))
    return _reference(x_THI, w_HIO)
