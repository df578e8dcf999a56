"""What each rank brings to a sum over ranks: rows, or what makes them, where who sends them does that better."""

from torch import Tensor

from glm5.kernels.fp8_linear.pending import PendingLinear
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs

PartialSum = Tensor | ExpertOutputs | PendingLinear


def computed(part: PartialSum) -> Tensor | ExpertOutputs:
    """The rows of a product that nobody sends on their way."""
    return part.computed() if isinstance(part, PendingLinear) else part


def summed(part: PartialSum) -> Tensor:
    """[T, D], whatever `part` is."""
    part = computed(part)
    return part.summed() if isinstance(part, ExpertOutputs) else part
