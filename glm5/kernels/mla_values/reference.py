"""One matrix for each head, heads side by side (model spec 3.3):

out[t, (h, v)] = sum_c x[t, h, c] w[h, c, v]
"""

import torch
from torch import Tensor

from glm5.kernels.act_quant import act_quant


@torch.no_grad()
def mla_values(out_THC: Tensor, w_HCV: Tensor) -> Tensor:
    """[T, H * V], written without a copy."""
    values_THV = out_THC.new_empty(len(out_THC), len(w_HCV), w_HCV.shape[2])
    torch.bmm(out_THC.transpose(0, 1), w_HCV, out=values_THV.transpose(0, 1))
    return values_THV.flatten(1)


def mla_values_quantized(out_THC: Tensor, w_HCV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`mla_values`, and `act_quant` of it."""
    values = mla_values(out_THC, w_HCV)
    return values, *act_quant(values)
