"""The routed experts' sum on a GPU with plain weights, without host synchronization: CUDA graphs can capture it.

bfloat16 uses torch's grouped GEMM with rows sorted by expert on the device. Other dtypes, which only small models have,
are computed for all experts, with weight 0 for those not chosen.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.grouped_experts.shared import adds_shared


@adds_shared
@torch.no_grad()
def grouped_experts(
    x_TD: Tensor, gate_up_proj: Tensor, down_proj: Tensor, weight_TA: Tensor, expert_TA: Tensor
) -> Tensor:
    """As `reference.grouped_experts`, outputs summed in float32. No gradient passes."""
    run = _sorted if x_TD.is_cuda and x_TD.dtype == torch.bfloat16 else _all
    return run(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA)


def _sorted(x_TD: Tensor, gate_up_proj: Tensor, down_proj: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
    num_experts, num_chosen = len(down_proj), expert_TA.shape[1]
    sorted_G, order_G = expert_TA.flatten().sort(stable=True)
    experts_E = torch.arange(num_experts, dtype=sorted_G.dtype, device=x_TD.device)
    end_E = torch.searchsorted(sorted_G, experts_E, right=True, out_int32=True)
    x_GD = x_TD.index_select(0, order_G // num_chosen)
    gate_GF, up_GF = F.grouped_mm(x_GD, gate_up_proj.mT, offs=end_E).chunk(2, dim=-1)
    y_GD = F.grouped_mm(F.silu(gate_GF) * up_GF, down_proj.mT, offs=end_E)
    y_GD = y_GD.float() * weight_TA.flatten().index_select(0, order_G)[:, None]
    outputs_GD = torch.empty_like(y_GD).index_copy_(0, order_G, y_GD)
    return outputs_GD.unflatten(0, expert_TA.shape).sum(dim=1).to(x_TD.dtype)


def _all(x_TD: Tensor, gate_up_proj: Tensor, down_proj: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
    weight_TE = weight_TA.new_zeros(len(x_TD), len(down_proj)).scatter_(1, expert_TA.long(), weight_TA)
    gate_ETF, up_ETF = torch.matmul(x_TD, gate_up_proj.mT).chunk(2, dim=-1)
    y_ETD = torch.bmm(F.silu(gate_ETF) * up_ETF, down_proj.mT)
    return (y_ETD * weight_TE.T[..., None]).sum(dim=0).to(x_TD.dtype)
