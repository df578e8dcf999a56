"""A linear layer: y = x W^T."""

from torch import Tensor
from torch.nn import functional as F


def row_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """[..., O]."""
    return F.linear(x, weight_OI)
