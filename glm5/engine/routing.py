"""Which experts computed a token: taken down while the model runs."""

import torch
from torch import Tensor

from glm5.model.glm5 import Glm5
from glm5.model.moe import MoE


class RoutingRecord:
    """Listens to the routers of a model's decoder layers, the MTP layer's excepted."""

    def __init__(self, model: Glm5):
        self._layers: list[list[Tensor]] = []
        for layer in model.model.layers[: model.cfg.num_hidden_layers]:
            if isinstance(layer.mlp, MoE):
                heard: list[Tensor] = []
                self._layers.append(heard)
                layer.mlp.gate.register_forward_hook(lambda _, __, out, heard=heard: heard.append(out[1]))

    def take(self) -> Tensor:
        """Experts of all rows since the last call, int16 [R, MoE layers, A]."""
        experts = torch.stack([torch.cat(heard) for heard in self._layers], dim=1).short()
        for heard in self._layers:
            heard.clear()
        return experts
