"""The routed experts' sum with its gradient in grouped GEMMs, without host synchronization: for training on a GPU.

    u = x[token] Wgu^T      h = silu(gate) * up      out[t] = sum_a w[t, a] (h Wd^T)[slot of (t, a)]

    dh' = dout[token] Wd   dw = dh' . h   dWd = dout[token]^T (w h)   du from w dh'   dWgu = du^T x[token]   dx = du Wgu

A slot is a row of an expert. Rows are sorted by expert, each padded to a multiple of _ALIGN rows, as the grouped GEMM
needs; padding has weight 0. Saved for backward are x, u and the routing. Rows of x and of the gradient are gathered
again, and dw does not need the result.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from glm5.kernels.grouped_experts.shared import adds_shared
from glm5.kernels.swiglu import swiglu, swiglu_backward
from glm5.kernels.weighted_rows import weighted_rows

_ALIGN = 8  # rows of 16 bits in 16 bytes


@adds_shared
def grouped_experts(
    x_TD: Tensor, gate_up_proj: Tensor, down_proj: Tensor, weight_TA: Tensor, expert_TA: Tensor
) -> Tensor:
    """As `reference.grouped_experts`, except that outputs are summed in float32 and rounded once."""
    return _Experts.apply(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA)


class Slots(NamedTuple):
    """The slot of each (token, choice) pair; the token and pair of each slot (0 and -1 for padding); the end of each
    expert's slots."""

    slot_TA: Tensor
    token_G: Tensor
    pair_G: Tensor
    end_E: Tensor

    @classmethod
    def of(cls, expert_TA: Tensor, num_experts: int) -> "Slots":
        """From experts [T, A]. The number of slots depends on shapes only."""
        expert_G, num_chosen = expert_TA.flatten().long(), expert_TA.shape[1]
        num_pairs, device = len(expert_G), expert_TA.device
        order_G = expert_G.argsort(stable=True)
        count_E = torch.zeros(num_experts, dtype=torch.long, device=device).index_add_(
            0, expert_G, expert_G.new_ones(1).expand(num_pairs)
        )
        filled_E = (count_E + _ALIGN - 1) // _ALIGN * _ALIGN
        end_E = filled_E.cumsum(0)
        moved_E = (end_E - filled_E) - (count_E.cumsum(0) - count_E)
        place_G = torch.arange(num_pairs, device=device) + moved_E[expert_G[order_G]]
        num_slots = -(-(num_pairs + num_experts * (_ALIGN - 1)) // _ALIGN) * _ALIGN
        pair_G = torch.full((num_slots,), -1, dtype=torch.long, device=device).scatter_(0, place_G, order_G)
        slot_TA = torch.empty_like(order_G).scatter_(0, order_G, place_G).view(expert_TA.shape)
        return cls(slot_TA, pair_G.clamp_min(0) // num_chosen, pair_G, end_E.int())

    def weights_of(self, weight_TA: Tensor) -> Tensor:
        """The weight of each slot's pair, 0 for padding."""
        return weight_TA.flatten()[self.pair_G.clamp_min(0)].masked_fill(self.pair_G < 0, 0.0)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, gate_up_proj: Tensor, down_proj: Tensor, weight_TA: Tensor, expert_TA: Tensor):
        slots = Slots.of(expert_TA, len(down_proj))
        gate_up_GY = F.grouped_mm(x_TD.index_select(0, slots.token_G), gate_up_proj.mT, offs=slots.end_E)
        y_GD = F.grouped_mm(swiglu(gate_up_GY), down_proj.mT, offs=slots.end_E)
        ctx.save_for_backward(x_TD, gate_up_proj, down_proj, weight_TA, gate_up_GY, *slots)
        return weighted_rows(y_GD, slots.slot_TA, weight_TA)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor):
        x_TD, gate_up_proj, down_proj, weight_TA, gate_up_GY, *places = ctx.saved_tensors
        slots = Slots(*places)
        grad_GD = grad_TD.index_select(0, slots.token_G)
        grad_hidden_GF = F.grouped_mm(grad_GD, down_proj, offs=slots.end_E)
        grad_up_GY, hidden_GF, grad_weight_G = swiglu_backward(gate_up_GY, grad_hidden_GF, slots.weights_of(weight_TA))
        grad_x_GD = F.grouped_mm(grad_up_GY, gate_up_proj, offs=slots.end_E)
        grad_x_TD = weighted_rows(grad_x_GD, slots.slot_TA, None)
        grad_down = F.grouped_mm(grad_GD.mT, hidden_GF, offs=slots.end_E)
        del grad_GD, grad_x_GD, hidden_GF, grad_hidden_GF
        grad_gate_up = F.grouped_mm(grad_up_GY.mT, x_TD.index_select(0, slots.token_G), offs=slots.end_E)
        return grad_x_TD, grad_gate_up, grad_down, grad_weight_G[slots.slot_TA].to(weight_TA.dtype), None
