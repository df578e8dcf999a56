"""The routed experts' sum without a gradient, on a CPU: NumPy sorts the rows, and one grouped GEMM computes all
experts.

With few rows per expert, as in decoding, half of the reference's time is sorting and calls per expert.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import forward_only
from glm5.kernels.grouped_experts.shared import adds_shared

_ALIGNMENT = 16  # bytes, of a row of anything that torch's grouped product reads


def refusal(x_TD: Tensor, gate_up_proj: Tensor | BlockScaled, down_proj: Tensor | BlockScaled) -> str | None:
    """Why these tensors cannot be handled; None if they can."""
    if isinstance(gate_up_proj, BlockScaled) or isinstance(down_proj, BlockScaled):
        return "needs plain weights, got BlockScaled"
    if x_TD.device.type != "cpu" or x_TD.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"needs float32, bfloat16 or float16 in host memory, got {x_TD.dtype} on {x_TD.device}"
    if any(width * x_TD.itemsize % _ALIGNMENT for width in down_proj.shape[1:]):
        return f"needs rows of a multiple of {_ALIGNMENT} bytes, got weights of {list(down_proj.shape)}"
    return None


@adds_shared
@forward_only("grouped_experts[grouped_mm]")
def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
) -> Tensor:
    """As `reference.grouped_experts`. No gradient passes. Raises ValueError where `refusal` has a reason."""
    if reason := refusal(x_TD, gate_up_proj, down_proj):
        raise ValueError(f"grouped_experts[grouped_mm] {reason}; use impl='reference'")
    assert isinstance(gate_up_proj, Tensor)
    assert isinstance(down_proj, Tensor)
    num_tokens, num_chosen = expert_TA.shape
    experts = expert_TA.numpy()
    order = experts.argsort(axis=None, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    # Rows are sorted by expert, so a token's own rows in ascending order are its experts in ascending order.
    place = np.sort(place.reshape(num_tokens, num_chosen), axis=1)
    end_E = torch.from_numpy(np.bincount(experts.ravel(), minlength=len(down_proj)).cumsum().astype(np.int32))

    x_GD = x_TD.index_select(0, torch.from_numpy(order // num_chosen))
    gate_GF, up_GF = F.grouped_mm(x_GD, gate_up_proj.mT, offs=end_E).chunk(2, dim=-1)
    y_GD = F.grouped_mm(F.silu(gate_GF) * up_GF, down_proj.mT, offs=end_E)
    weight_G = weight_TA.flatten().index_select(0, torch.from_numpy(order))
    y_GD = (y_GD * weight_G[:, None]).to(x_TD.dtype)
    outputs = (
        y_GD.index_select(0, torch.from_numpy(place.ravel())).view(num_tokens, num_chosen, x_TD.shape[1]).unbind(1)
    )
    return sum(outputs[1:], start=outputs[0])
