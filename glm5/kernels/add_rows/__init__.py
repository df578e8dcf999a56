"""Rows added to those of a matrix that they name, in the order in which they lie: the same bits in every run."""

from typing import Literal

from torch import Tensor

from glm5.kernels.add_rows.reference import add_rows as _reference
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.triton_support import runs_on


def add_rows(
    to_SL: Tensor, slot_G: Tensor, row_GL: Tensor, *, impl: Literal["auto", "reference", "triton"] = "auto"
) -> None:
    """to[slot[g]] += row[g] in place; rows of slot -1 are not read. No gradient passes."""
    if impl == "triton" or (impl == "auto" and runs_on(to_SL, row_GL)):
        from glm5.kernels.add_rows.triton import add_rows as run

        run(to_SL, slot_G, row_GL)
    elif impl in ("auto", "reference"):
        _reference(to_SL, slot_G, row_GL)
    else:
        raise unknown_impl("add_rows", impl, ("reference", "triton"))
