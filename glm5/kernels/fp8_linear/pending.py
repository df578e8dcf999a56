"""A linear layer computed by its consumer, which can send rows to other ranks while others are computed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.fp8_linear import fp8_linear


@dataclass(frozen=True)
class PendingLinear:
    """The arguments of `fp8_linear`."""

    x_TD: Tensor
    weight: BlockScaled
    quantized: tuple[Tensor, Tensor] | None

    @property
    def shape(self) -> tuple[int, int]:
        """(T, O), of the result."""
        return len(self.x_TD), len(self.weight.data)

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.x_TD.dtype

    def computed(self) -> Tensor:
        """[T, O] in x's dtype."""
        return fp8_linear(self.x_TD, self.weight, self.quantized)
