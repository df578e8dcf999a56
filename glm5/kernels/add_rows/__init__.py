"""Adds rows to rows of a matrix by index, in a fixed order: the result is deterministic."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(
    __name__,
    triton=Impl("rows of a target one after the other, without waiting for the device", on="triton"),
    reference=Impl("the definition"),
)


def add_rows(to_SL: Tensor, slot_G: Tensor, row_GL: Tensor, *, impl: str = "auto") -> None:
    """to[slot[g]] += row[g] in place; rows of slot -1 are not read. No gradient passes."""
    TABLE.module(impl, to_SL).add_rows(to_SL, slot_G, row_GL)
