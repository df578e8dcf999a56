"""Dynamic quantization of activations with one scale per token:

    scale = max|x| / highest        code = clamp(round(x / scale), -highest, highest)        highest 127, or 448 of e4m3

A row of zeros has scale 1. Results are those of the fake quantization of `glm5.quant.minmax`.
"""

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8, FP8_MAX, divided
from glm5.kernels.quantized_weight import Act

HIGHEST: dict[Act, float] = {"int8": 127.0, "fp8": FP8_MAX}


@torch.no_grad()
def token_quant(x_TD: Tensor, kind: Act) -> tuple[Tensor, Tensor]:
    """(codes [T, D], scale [T])."""
    wide = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    highest = HIGHEST[kind]
    scale_T = divided(wide.abs().amax(-1), highest)
    scale_T = scale_T.masked_fill(scale_T == 0, 1.0)
    codes = wide / scale_T[:, None]
    if kind == "fp8":
        return codes.clamp(-highest, highest).to(FP8), scale_T
    return codes.round().clamp(-highest, highest).to(torch.int8), scale_T
