"""Removes from a model the modules of other pipeline stages."""

from torch import Tensor, nn

from glm5.model.glm5 import Glm5
from glm5.train.parallel.row_layout import RowLayout


class Elsewhere(nn.Module):
    """A placeholder for a module of another stage. `weight`: an empty tensor with the dtype and device of passes."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight


def keep_stage(model: Glm5, layout: RowLayout, stage: int, like: Tensor) -> None:
    """Replace the modules of other stages, in place. `like`: an empty tensor with the dtype and device of passes."""
    trunk, last = model.model, stage == layout.mesh.last_stage
    for layer_idx in range(len(trunk.layers)):
        if layout.stage(f"model.layers.{layer_idx}.") != stage:
            trunk.layers[layer_idx] = Elsewhere(like)
    if not last:
        trunk.norm = Elsewhere(like)  # type: ignore[assignment]
        model.lm_head = Elsewhere(like)  # type: ignore[assignment]
        model.value_head = None
    if stage != 0 and not (last and model.cfg.num_nextn_predict_layers):
        trunk.embed_tokens = Elsewhere(like)  # type: ignore[assignment]
