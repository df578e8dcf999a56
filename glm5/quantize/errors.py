"""Errors of a quantized weight: of the weight itself, and of what the layer answers to inputs it was given."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.quant.record import Grid
from glm5.quantize.layer import fake_input


@dataclass
class Errors:
    """Sums of squares, wrong and right, of weights and of outputs: what experts add up to."""

    weight: tuple[float, float] = (0.0, 0.0)
    output: tuple[float, float] = (0.0, 0.0)

    def add(self, other: "Errors") -> None:
        self.weight = (self.weight[0] + other.weight[0], self.weight[1] + other.weight[1])
        self.output = (self.output[0] + other.output[0], self.output[1] + other.output[1])

    def relative(self) -> dict[str, float]:
        """Relative RMS of both; of outputs where there were inputs."""
        found = {"weight": ratio(*self.weight)}
        return found | ({"output": ratio(*self.output)} if self.output[1] else {})


def errors_of(weight_OI: Tensor, value_OI: Tensor, act: Grid | None, x_TI: Tensor | None) -> Errors:
    """Of one matrix: its values against it, and fake(x) value^T against x weight^T."""
    found = Errors(weight=squares(value_OI, weight_OI))
    if x_TI is not None and len(x_TI):
        y_TO = F.linear(x_TI, weight_OI)
        found.output = squares(F.linear(fake_input(x_TI, act), value_OI), y_TO)
    return found


def squares(got: Tensor, want: Tensor) -> tuple[float, float]:
    """|got - want|^2 and |want|^2."""
    sums = torch.stack([(got - want).square().sum(dtype=torch.float64), want.square().sum(dtype=torch.float64)])
    wrong, right = sums.tolist()
    return wrong, right


def ratio(wrong: float, right: float) -> float:
    return (wrong / right) ** 0.5 if right else 0.0


def evenly(x: Tensor, most: int) -> Tensor:
    """At most so many rows, spread over all."""
    if x.shape[0] <= most:
        return x
    return x[torch.linspace(0, x.shape[0] - 1, most, device=x.device).long()]
