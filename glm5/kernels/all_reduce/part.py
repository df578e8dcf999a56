"""A rank's part of a sum over ranks: rows, unsummed expert outputs, or a pending linear layer."""

from torch import Tensor

from glm5.kernels.fp8_linear.pending import PendingLinear
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs

PartialSum = Tensor | ExpertOutputs | PendingLinear


def computed(part: PartialSum) -> Tensor | ExpertOutputs:
    """The part, with a pending linear layer computed."""
    return part.computed() if isinstance(part, PendingLinear) else part


def summed(part: PartialSum) -> Tensor:
    """[T, D], whatever `part` is."""
    part = computed(part)
    return part.summed() if isinstance(part, ExpertOutputs) else part
