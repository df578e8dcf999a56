"""Root-mean-square norm over the last dimension.

    y = (x / sqrt(mean(x^2) + eps)).to(x.dtype) * weight

The cast comes before the multiply by weight, as in the published model (model spec 3.1).
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised `x`, same shape and dtype. float32 inside; float64 stays float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
