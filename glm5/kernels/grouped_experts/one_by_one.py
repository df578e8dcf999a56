"""The routed experts' sum for a token or two without a gradient, on a CPU: expert after expert, without sorting.

With one or two rows and few experts, gathering rows would take longer than computing.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import forward_only
from glm5.kernels.grouped_experts.shared import adds_shared

MAX_PAIRS = 4  # of token and expert


@adds_shared
@forward_only("grouped_experts[one_by_one]")
def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
) -> Tensor:
    """As `reference.grouped_experts`. No gradient passes. Raises ValueError for weights that are not plain."""
    if isinstance(gate_up_proj, BlockScaled) or isinstance(down_proj, BlockScaled):
        raise ValueError("grouped_experts[one_by_one] needs plain weights, got BlockScaled; use impl='reference'")
    rows = zip(x_TD.split(1), weight_TA.tolist(), expert_TA.tolist(), strict=True)
    sums = [
        _visit(x_1D, sorted(zip(experts, weights, strict=True)), gate_up_proj, down_proj)
        for x_1D, weights, experts in rows
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _visit(x_1D: Tensor, pairs: list[tuple[int, float]], gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
    width, outputs = down_proj.shape[2], list[Tensor]()
    for expert, weight in pairs:
        gate_up_1F = F.linear(x_1D, gate_up_proj[expert])
        hidden_1F = F.silu(gate_up_1F[:, :width]).mul_(gate_up_1F[:, width:])
        outputs.append(F.linear(hidden_1F, down_proj[expert]).mul_(weight))
    return sum(outputs[1:], start=outputs[0])
