"""A linear layer whose rows do not depend on how many there are."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(
    __name__,
    triton=Impl("one tiling for any number of rows", on="triton", gradient=False),
    reference=Impl("the definition"),
)


def row_linear(x: Tensor, weight_OI: Tensor, *, impl: str = "auto") -> Tensor:
    """x [..., I] times the transpose of the weight: [..., O] in x's dtype.

    `triton`: on a GPU, up to float32; a row has the same bits among any number of rows, which a library's product does
    not promise; no gradient.
    """
    return TABLE.module(impl, x, weight_OI).row_linear(x, weight_OI)
