"""Sums of gathered rows.

out[t] = sum_a weight[t, a] row[slot[t, a]]        in float32, rounded once
"""

import torch
from torch import Tensor


@torch.no_grad()
def weighted_rows(row_GD: Tensor, slot_TA: Tensor, weight_TA: Tensor | None) -> Tensor:
    """[T, D] in the rows' dtype; float64 stays float64."""
    wide = torch.promote_types(row_GD.dtype, torch.float32)
    row_TAD = row_GD.index_select(0, slot_TA.flatten()).unflatten(0, slot_TA.shape).to(wide)
    if weight_TA is not None:
        row_TAD = row_TAD * weight_TA.to(wide).unsqueeze(-1)
    return row_TAD.sum(dim=1).to(row_GD.dtype)
