"""Root-mean-square norm."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.rms_norm.fused import rms_norm as _fused
from glm5.kernels.rms_norm.reference import rms_norm as _reference
from glm5.kernels.triton_support import chosen, runs_on


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    impl: Literal["auto", "reference", "fused", "triton", "trained"] = "auto",
) -> Tensor:
    """`x` [..., D] over its root mean square along D, cast to x.dtype, times `weight` [D] (model spec 3.1).

    `triton`: without a gradient; `trained`: in Triton with one.
    """
    if impl == "auto":
        impl = "triton" if chosen(x, weight) else "trained" if runs_on(x, weight) else "fused"
    if impl == "triton":
        from glm5.kernels.rms_norm.triton import rms_norm as run

        return run(x, weight, eps)
    if impl == "trained":
        from glm5.kernels.rms_norm.triton_trained import rms_norm as run

        return run(x, weight, eps)
    if impl == "fused":
        return _fused(x, weight, eps)
    if impl == "reference":
        return _reference(x, weight, eps)
    raise unknown_impl("rms_norm", impl, ("reference", "fused", "triton", "trained"))
