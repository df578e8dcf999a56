"""Root-mean-square norm."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(
    __name__,
    triton=Impl("one pass", on="triton", gradient=False),
    trained=Impl("one pass forward and one backward", on="triton", module="triton_trained"),
    fused=Impl("a third of the operations that autograd makes of the reference"),
    reference=Impl("the definition"),
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    impl: str = "auto",
) -> Tensor:
    """`x` [..., D] over its root mean square along D, cast to x.dtype, times `weight` [D] (model spec 3.1).

    `triton`: without a gradient; `trained`: in Triton with one.
    """
    return TABLE.module(impl, x, weight).rms_norm(x, weight, eps)
