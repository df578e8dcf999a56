"""Sums of a token's rows, each with its weight."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.triton_support import runs_on
from glm5.kernels.weighted_rows.reference import weighted_rows as _reference


def weighted_rows(
    row_GD: Tensor, slot_TA: Tensor, weight_TA: Tensor | None, *, impl: Literal["auto", "reference", "triton"] = "auto"
) -> Tensor:
    """out[t] = sum_a weight[t, a] row[slot[t, a]], [T, D] in the rows' dtype, summed in float32. No weights: 1 each.

    No gradient passes.
    """
    if impl == "triton" or (impl == "auto" and runs_on(row_GD)):
        from glm5.kernels.weighted_rows.triton import weighted_rows as run

        return run(row_GD, slot_TA, weight_TA)
    if impl in ("auto", "reference"):
        return _reference(row_GD, slot_TA, weight_TA)
    raise unknown_impl("weighted_rows", impl, ("reference", "triton"))
