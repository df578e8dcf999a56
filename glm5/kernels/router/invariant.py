"""The router with a sigmoid that computes all elements alike. Its matmul relies on calls with one number of rows."""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.dispatch import forward_only
from glm5.kernels.invariant import sigmoid
from glm5.kernels.router.reference import choose


@forward_only("router[invariant]")
def router(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """As `reference.router`, without gradients."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return choose(
        sigmoid(F.linear(x_TD.to(wide), weight_ED.to(wide))),
        bias_E,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        scaling_factor=scaling_factor,
    )
