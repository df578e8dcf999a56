"""A model's weights under the names that glm5.quant knows, experts stacked by matrix, and back."""

import copy

import torch
from torch import Tensor

from glm5.model.glm5 import Glm5


def stacked_by_name(model: Glm5) -> dict[str, Tensor]:
    """`...experts.gate_up_proj` [E, 2F, D] becomes `...experts.*.gate_proj.weight` and `up_proj`, [E, F, D] each."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            at = name.removesuffix("gate_up_proj")
            tensors[f"{at}*.gate_proj.weight"], tensors[f"{at}*.up_proj.weight"] = tensor.chunk(2, 1)
        elif name.endswith("experts.down_proj"):
            tensors[name.replace("experts.down_proj", "experts.*.down_proj.weight")] = tensor
        else:
            tensors[name] = tensor
    return tensors


def with_tensors(model: Glm5, tensors: dict[str, Tensor]) -> Glm5:
    """A copy of the model with these weights, named as above."""
    state = {name: tensor for name, tensor in tensors.items() if ".*." not in name}
    for name in tensors:
        if name.endswith("experts.*.gate_proj.weight"):
            at = name.removesuffix("*.gate_proj.weight")
            state[f"{at}gate_up_proj"] = torch.cat([tensors[name], tensors[f"{at}*.up_proj.weight"]], 1)
            state[f"{at}down_proj"] = tensors[f"{at}*.down_proj.weight"]
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    return other
