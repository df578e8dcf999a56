"""Small models with weights large enough that every part of the architecture shows in the logits."""

import torch

from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.model.glm5 import Glm5


@torch.no_grad()
def random_model(seed: int, cfg: ModelConfig | None = None, dtype: torch.dtype = torch.float32) -> Glm5:
    """`tiny` by default. Unit-scale activations; norms, biases and index scores away from neutral values."""
    model = Glm5(cfg or preset("tiny"))
    gen = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=gen, dtype=torch.float32)
        if name.endswith("norm.weight"):
            tensor.copy_(1 + 0.2 * noise)
        elif name.endswith(("norm.bias", "e_score_correction_bias")):
            tensor.copy_(0.1 * noise)
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(noise)
        else:
            tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    return model.to(dtype).eval()
