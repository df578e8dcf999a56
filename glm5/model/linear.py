"""Linear layers: the seam through which weight formats enter the model. None has a bias."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.kernels.block_scaled import BLOCK, BlockScaled
from glm5.kernels.fp8_linear import fp8_linear
from glm5.kernels.invariant import Impl
from glm5.kernels.quantized_linear import quantized_linear
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat
from glm5.kernels.row_linear import row_linear


class Linear(nn.Module):
    """y = x W^T with `weight` [O, I] in the model's dtype. `impl`: the product of torch, or `row_linear`."""

    impl: Impl = "auto"

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)

    def product(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """x times the transpose of a weight like this layer's."""
        return F.linear(x, weight_OI) if self.impl == "auto" else row_linear(x, weight_OI)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] as a plain tensor, for math that folds it (absorbed attention)."""
        return self.weight.to(dtype)


class BlockScaledLinear(nn.Module):
    """y = x W^T with an FP8 weight in 128x128 blocks and activations quantized per token and 128 inputs.

    Parameters as in the checkpoint: `weight` [O, I] e4m3 and `weight_scale_inv` [ceil(O/128), ceil(I/128)] float32;
    the weight is their product (model spec, section 3.8).
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        grid = (-(-out_features // BLOCK), -(-in_features // BLOCK))
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn), requires_grad=False
        )
        self.weight_scale_inv = nn.Parameter(torch.empty(grid, dtype=torch.float32), requires_grad=False)

    @property
    def block_scaled(self) -> BlockScaled:
        return BlockScaled(self.weight, self.weight_scale_inv)

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.block_scaled)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [O, I], rounded once to `dtype`."""
        return self.block_scaled.dequantize(dtype)


class QuantizedLinear(nn.Module):
    """y = x W^T with a quantized weight, and x quantized per row where `format` says so.

    `weight` [O, I] int8 or e4m3, or two 4-bit codes a byte [O, I / 2]; `weight_scale` [O, G] float32.
    """

    def __init__(self, in_features: int, out_features: int, weight_format: WeightFormat):
        super().__init__()
        self.format = weight_format
        weight = torch.empty(out_features, in_features // weight_format.per_byte, dtype=weight_format.dtype)
        scale = torch.empty(out_features, weight_format.num_scales(in_features), dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.weight, self.weight_scale, self.format)

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.quantized_weight)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [O, I], rounded once to `dtype`."""
        return self.quantized_weight.dequantize(dtype)
