"""The shared expert: what every token visits besides its routed experts, with weight 1."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.fp8_linear import fp8_linear

Weight = Tensor | BlockScaled


class SharedExpert(NamedTuple):
    """`gate` and `up` [F, D], `down` [D, F]: the weights where they are, plain or in FP8, of one kind."""

    gate: Weight
    up: Weight
    down: Weight

    def __call__(self, x_TD: Tensor) -> Tensor:
        """down(silu(gate x) * up x), [T, D]."""
        return _linear(F.silu(_linear(x_TD, self.gate)) * _linear(x_TD, self.up), self.down)


def _linear(x: Tensor, weight: Tensor | BlockScaled) -> Tensor:
    return fp8_linear(x, weight) if isinstance(weight, BlockScaled) else F.linear(x, weight)


def adds_shared(routed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of a function for routed experts alone, one that adds what the shared expert makes of x."""

    @wraps(routed)
    def both(x_TD: Tensor, *given: Any) -> Tensor:
        *routing, shared, _quantized = given
        out_TD = routed(x_TD, *routing)
        return out_TD if shared is None else out_TD + shared(x_TD)

    return both
