"""Products of every head with a matrix of its own: what absorption puts before and behind latent attention."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.per_head.reference import per_head as _reference
from glm5.kernels.triton_support import chosen

FEW_TOKENS = 64  # more are better served by a batched product of the library


def per_head(x_THI: Tensor, w_HIO: Tensor, *, impl: Literal["auto", "reference", "triton"] = "auto") -> Tensor:
    """`x_THI` [T, H, I] by `w_HIO` [H, I, O]: [T, H, O] in x's dtype.

    `triton`: on a GPU, for few tokens; no gradient.
    """
    if impl == "auto":
        impl = "triton" if len(x_THI) <= FEW_TOKENS and chosen(x_THI, w_HIO) else "reference"
    if impl == "reference":
        return _reference(x_THI, w_HIO)
    if impl == "triton":
        from glm5.kernels.per_head.triton import per_head as run

        return run(x_THI, w_HIO)
    raise unknown_impl("per_head", impl, ("reference", "triton"))
