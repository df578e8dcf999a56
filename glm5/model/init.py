"""Random weights to start training from: normal(0, initializer_range), norms at one, biases at zero."""

from collections.abc import Iterable

import torch
from torch import Tensor

from glm5.model.glm5 import Glm5


def init_weights(model: Glm5, seed: int) -> Glm5:
    """Fill every parameter of `model` in place, in the order of `named_parameters`; the same seed gives the same."""
    init_parameters(model.named_parameters(), model.cfg.initializer_range, seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    return model


@torch.no_grad()
def init_parameters(named: Iterable[tuple[str, Tensor]], std: float, seed: int) -> None:
    """Fill these parameters in place, in their order."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in named:
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("norm.bias"):
            parameter.zero_()
        else:
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
