"""Queries as latent attention and its indexer take them (model spec 3.3 and 3.4):

[n, r] = q[t, h]        absorbed[t, h] = [n w[h], rope(r)]        index[t, j] = [rope(index[:R]), index[R:]]
"""

import torch
from torch import Tensor

from glm5.kernels.per_head import per_head
from glm5.kernels.rope import rope


@torch.no_grad()
def mla_queries(
    q_THX: Tensor, w_HNC: Tensor, cos_TR2: Tensor, sin_TR2: Tensor, index_TJI: Tensor | None = None
) -> Tensor:
    """Absorbed queries [T, H, C + R]; `index_TJI` is rotated in place."""
    nope = w_HNC.shape[1]
    rotated_THR = rope(q_THX[..., nope:], cos_TR2, sin_TR2, impl="reference")
    if index_TJI is not None:
        part = index_TJI[..., : rotated_THR.shape[-1]]
        part.copy_(rope(part, cos_TR2, sin_TR2, impl="reference"))
    return torch.cat([per_head(q_THX[..., :nope], w_HNC, impl="reference"), rotated_THR], dim=-1)
