"""Records which experts computed each token, while the model runs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from glm5.engine.runner.forward.passes import Passes
from glm5.model.moe import MoE


def _record(recorded: list[Tensor], _module: Any, _inputs: Any, out: tuple[Tensor, Tensor]) -> None:
    recorded.append(out[1])


class RoutingRecord:
    """Records the outputs of the routers of a model's decoder layers, the MTP layer's excepted."""

    def __init__(self, passes: Passes):
        self._passes: list[Tensor] = []
        if passes.fused is not None:
            self._layers = passes.fused.record_routing()
            return
        self._layers, model = list[list[Tensor]](), passes.model
        if model.trunk is not None:
            model.trunk.recorded = self._passes
            return
        for layer in model.model.layers[: model.cfg.num_hidden_layers]:
            if isinstance(layer.mlp, MoE):
                recorded: list[Tensor] = []
                self._layers.append(recorded)
                layer.mlp.gate.register_forward_hook(partial(_record, recorded))

    def clear(self) -> None:
        """Discard everything recorded: the model may have run for other purposes."""
        self._passes.clear()
        self.pass_begins()

    def experts(self) -> Tensor:
        """Experts of all rows since `clear`, int16 [T, MoE layers, A]."""
        return torch.cat(self._passes) if self._passes else self.pass_ended()

    def pass_begins(self) -> None:
        """Start to record a pass separately."""
        for recorded in self._layers:
            recorded.clear()

    def pass_ended(self) -> Tensor:
        """Experts of the rows since `pass_begins`."""
        return torch.stack([torch.cat(recorded) for recorded in self._layers], dim=1).short()

    def add(self, expert_ids_T: Tensor) -> None:
        """Add the experts of a pass that a graph replay computed, without recording."""
        self._passes.append(expert_ids_T)
