"""What a stage of a pipeline has of the model."""

from torch import Tensor, nn

from glm5.model.glm5 import Glm5
from glm5.train.parallel.row_layout import RowLayout


class Elsewhere(nn.Module):
    """In the place of a module that another stage has. `weight`: of the dtype and device that passes have here."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight


def keep_stage(model: Glm5, places: RowLayout, stage: int, like: Tensor) -> None:
    """Leave in `model` what the stage has; `like`: an empty tensor, of the dtype and device of passes."""
    trunk, last = model.model, stage == places.mesh.last_stage
    for layer_idx in range(len(trunk.layers)):
        if places.stage(f"model.layers.{layer_idx}.") != stage:
            trunk.layers[layer_idx] = Elsewhere(like)
    if not last:
        trunk.norm = Elsewhere(like)  # type: ignore[assignment]
        model.lm_head = Elsewhere(like)  # type: ignore[assignment]
    if stage != 0 and not (last and model.cfg.num_nextn_predict_layers):
        trunk.embed_tokens = Elsewhere(like)  # type: ignore[assignment]
