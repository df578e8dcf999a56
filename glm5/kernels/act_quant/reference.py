"""Activations in FP8: one scale per token and 128 values (model spec 3.8).

scale = max(amax, 1e-4) / 448          x_fp8 = e4m3(clamp(x / scale, -448, 448)), to nearest even
"""

import torch
from torch import Tensor

from glm5.kernels.block_scaled import BLOCK, FP8, FP8_MAX, divided, num_blocks

MIN_AMAX = 1e-4


@torch.no_grad()
def act_quant(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """(x_fp8 [T, D], scale [T, ceil(D/128)] float32). The last group may be ragged."""
    num_values = x_TD.shape[-1]
    groups = torch.nn.functional.pad(x_TD.float(), (0, num_blocks(num_values) * BLOCK - num_values))
    groups = groups.unflatten(-1, (-1, BLOCK))
    amax = groups.abs().amax(dim=-1).clamp_min(MIN_AMAX)
    scale = divided(amax, FP8_MAX)
    x_fp8 = (groups / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return x_fp8.flatten(-2)[..., :num_values].contiguous(), scale
