"""One matrix per head: the absorbed products before and after latent attention.

This is torch.bmm, which no kernel tried here has beaten (docs/performance-tried.md).
"""

import torch
from torch import Tensor


def per_head(x_THI: Tensor, w_HIO: Tensor) -> Tensor:
    """`x_THI` [T, H, I] by `w_HIO` [H, I, O]: [T, H, O] in x's dtype, a transposed view."""
    return torch.bmm(x_THI.transpose(0, 1), w_HIO).transpose(0, 1)
