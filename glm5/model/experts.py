"""Routed experts, stacked: the seam through which expert formats and expert dispatch enter the model.

`impl` names the implementation of `grouped_experts` or `quantized_experts` that they run (lowering.py sets it).
"""

import torch
from torch import Tensor, nn

from glm5.kernels.block_scaled import BLOCK, BlockScaled
from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.invariant import Impl
from glm5.kernels.quantized_experts import quantized_experts
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat


class Experts(nn.Module):
    """`gate_up_proj` [E, 2F, D] (gate rows first) and `down_proj` [E, D, F] in the model's dtype."""

    impl: Impl = "auto"

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        """Sum over the chosen experts of weight * expert(x): [T, D]."""
        return grouped_experts(x_TD, self.gate_up_proj, self.down_proj, weight_TA, expert_TA, impl=self.impl)


class BlockScaledExperts(nn.Module):
    """The same with e4m3 weights in 128x128 blocks.

    Gate and up keep the block grids they have on disk, one above the other: `gate_up_proj_scale_inv`
    [E, 2 ceil(F/128), ceil(D/128)], `down_proj_scale_inv` [E, ceil(D/128), ceil(F/128)], float32.
    """

    impl: Impl = "auto"

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        hidden_blocks, inner_blocks = -(-hidden_size // BLOCK), -(-intermediate_size // BLOCK)

        def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        fp8, f32 = torch.float8_e4m3fn, torch.float32
        self.gate_up_proj = frozen(num_experts, 2 * intermediate_size, hidden_size, dtype=fp8)
        self.gate_up_proj_scale_inv = frozen(num_experts, 2 * inner_blocks, hidden_blocks, dtype=f32)
        self.down_proj = frozen(num_experts, hidden_size, intermediate_size, dtype=fp8)
        self.down_proj_scale_inv = frozen(num_experts, hidden_blocks, inner_blocks, dtype=f32)

    def forward(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        gate_up = BlockScaled(self.gate_up_proj, self.gate_up_proj_scale_inv)
        down = BlockScaled(self.down_proj, self.down_proj_scale_inv)
        return grouped_experts(x_TD, gate_up, down, weight_TA, expert_TA, impl=self.impl)


class QuantizedExperts(nn.Module):
    """The same with quantized weights, and rows quantized where `format` says so (kernels.quantized_weight).

    `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F], of 4-bit codes two a byte; `gate_up_proj_scale` [E, 2F, G] and
    `down_proj_scale` [E, D, G], float32.
    """

    impl: Impl = "auto"

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, weight_format: WeightFormat):
        super().__init__()
        self.format = weight_format

        def codes(*shape: int, width: int) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(*shape, width // weight_format.per_byte, dtype=weight_format.dtype), requires_grad=False
            )

        def scale(*shape: int, width: int) -> nn.Parameter:
            held = torch.empty(*shape, weight_format.num_scales(width), dtype=torch.float32)
            return nn.Parameter(held, requires_grad=False)

        self.gate_up_proj = codes(num_experts, 2 * intermediate_size, width=hidden_size)
        self.gate_up_proj_scale = scale(num_experts, 2 * intermediate_size, width=hidden_size)
        self.down_proj = codes(num_experts, hidden_size, width=intermediate_size)
        self.down_proj_scale = scale(num_experts, hidden_size, width=intermediate_size)

    def forward(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor, plus_TD: Tensor | None = None) -> Tensor:
        """Likewise; `plus_TD` is added."""
        gate_up = QuantizedWeight(self.gate_up_proj, self.gate_up_proj_scale, self.format)
        down = QuantizedWeight(self.down_proj, self.down_proj_scale, self.format)
        return quantized_experts(x_TD, gate_up, down, weight_TA, expert_TA, plus_TD, impl=self.impl)
