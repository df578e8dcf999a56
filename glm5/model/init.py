"""Random weights to start training from: normal(0, initializer_range), norms at one, biases at zero."""

import torch

from glm5.model.glm5 import Glm5


@torch.no_grad()
def init_weights(model: Glm5, seed: int) -> Glm5:
    """Fill every parameter of `model` in place, in the order of `named_parameters`; the same seed gives the same."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("norm.bias"):
            parameter.zero_()
        else:
            noise = torch.empty(parameter.shape).normal_(0.0, model.cfg.initializer_range, generator=generator)
            parameter.copy_(noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    return model
