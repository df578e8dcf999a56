"""Sums of a token's rows, each with its weight."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(__name__, triton=Impl("gathers and sums in one pass", on="triton"), reference=Impl("the definition"))


def weighted_rows(row_GD: Tensor, slot_TA: Tensor, weight_TA: Tensor | None, *, impl: str = "auto") -> Tensor:
    """out[t] = sum_a weight[t, a] row[slot[t, a]], [T, D] in the rows' dtype, summed in float32. No weights: 1 each.

    No gradient passes.
    """
    return TABLE.module(impl, row_GD).weighted_rows(row_GD, slot_TA, weight_TA)
