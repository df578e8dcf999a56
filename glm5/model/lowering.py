"""Swaps modules of a model for the same layer in another weight format, before the weights are loaded."""

from collections.abc import Iterable

import torch

from glm5.model.experts import BlockScaledExperts, Experts
from glm5.model.glm5 import Glm5
from glm5.model.linear import BlockScaledLinear, Linear


def use_block_scaled(model: Glm5, module_names: Iterable[str]) -> None:
    """Replace the named `Linear` and `Experts` modules of `model` by their FP8 forms, in place, on their device.

    Names are module paths (`model.layers.3.mlp.experts`). Weights of the new modules are uninitialised.
    """
    for name in module_names:
        parent = model.get_submodule(name.rpartition(".")[0])
        old = model.get_submodule(name)
        with torch.device(next(old.parameters()).device):
            setattr(parent, name.rpartition(".")[2], _block_scaled_form(name, old))


def _block_scaled_form(name: str, module: torch.nn.Module) -> BlockScaledLinear | BlockScaledExperts:
    match module:
        case Linear():
            out_features, in_features = module.weight.shape
            return BlockScaledLinear(in_features, out_features)
        case Experts():
            num_experts, hidden_size, intermediate_size = module.down_proj.shape
            return BlockScaledExperts(num_experts, hidden_size, intermediate_size)
        case _:
            raise TypeError(f"{name} is a {type(module).__name__}; only Linear and Experts have an FP8 form")
