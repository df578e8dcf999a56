"""One matrix for each head.

out[t, h] = x[t, h] w[h]
"""

import torch
from torch import Tensor


def per_head(x_THI: Tensor, w_HIO: Tensor) -> Tensor:
    """[T, H, O]; the result is a transposed view."""
    return torch.bmm(x_THI.transpose(0, 1), w_HIO).transpose(0, 1)
