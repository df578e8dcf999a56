"""Rows added to a matrix by index.

to[slot[g]] += row[g]        for g in order, where slot[g] >= 0
"""

import torch
from torch import Tensor


@torch.no_grad()
def add_rows(to_SL: Tensor, slot_G: Tensor, row_GL: Tensor) -> None:
    """In place."""
    real_G = slot_G >= 0
    to_SL.index_add_(0, slot_G[real_G].long(), row_GL[real_G].to(to_SL.dtype))
