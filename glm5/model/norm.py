"""RMSNorm whose cast to the model's dtype comes before the multiplication by the weight (model spec, section 3.1)."""

import torch
from torch import Tensor, nn

from glm5.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """y = weight * (x * rsqrt(mean(x^2) + eps)), over the last dimension."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
