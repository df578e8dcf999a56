"""The shared expert, which every token visits besides its routed experts, with weight 1."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.fp8_linear import fp8_linear

Weight = Tensor | BlockScaled


class SharedExpert(NamedTuple):
    """`gate` and `up` [F, D], `down` [D, F]: views of the weights, all plain or all FP8."""

    gate: Weight
    up: Weight
    down: Weight

    def __call__(self, x_TD: Tensor) -> Tensor:
        """down(silu(gate x) * up x), [T, D]."""
        return linear(F.silu(linear(x_TD, self.gate)) * linear(x_TD, self.up), self.down)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x times the transpose of a plain or FP8 weight."""
    return fp8_linear(x, weight) if isinstance(weight, BlockScaled) else F.linear(x, weight)


def adds_shared(routed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorates a function of routed experts: adds the output of the shared expert."""

    @wraps(routed)
    def both(x_TD: Tensor, *given: Any) -> Tensor:
        *routing, shared, _quantized = given
        out_TD = routed(x_TD, *routing)
        return out_TD if shared is None else out_TD + shared(x_TD)

    return both
