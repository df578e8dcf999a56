"""Queries as latent attention takes them (model spec 3.3):

[n, r] = q[t, h]        absorbed[t, h] = [n w[h], rope(r)]
"""

import torch
from torch import Tensor

from glm5.kernels.per_head import per_head
from glm5.kernels.rope import rope


@torch.no_grad()
def mla_queries(
    q_THX: Tensor, w_HNC: Tensor, cos_TR2: Tensor, sin_TR2: Tensor, *, early: Tensor | None = None
) -> Tensor:
    """Absorbed queries [T, H, C + R]."""
    nope = w_HNC.shape[1]
    rotated_THR = rope(q_THX[..., nope:], cos_TR2, sin_TR2, impl="reference")
    return torch.cat([per_head(q_THX[..., :nope], w_HNC), rotated_THR], dim=-1, out=early)
