"""Quantizes the columns of a block in order; the error of each is compensated by the remaining columns.

q_k = round(w_k / s_k)    e_k = (w_k - s_k q_k) / U_kk    w_j <- w_j - e_k U_kj    for j > k
"""

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8


def gptq_block(
    w_BOK: Tensor, factor_BKK: Tensor, scale_BOK: Tensor, quant_min: float, quant_max: float, *, fp8: bool
) -> tuple[Tensor, Tensor]:
    """(codes, errors) in w's dtype."""
    w = w_BOK.clone()
    codes, errors = torch.empty_like(w), torch.empty_like(w)
    for k in range(w.shape[-1]):
        column = w[..., k : k + 1]
        scale = scale_BOK if scale_BOK.shape[-1] == 1 else scale_BOK[..., k : k + 1]
        near = (column / scale).clamp_(quant_min, quant_max)
        code = near.to(FP8).to(w.dtype) if fp8 else near.round_()
        errors[..., k : k + 1] = (column - code * scale) / factor_BKK[:, k, k, None, None]
        w[..., k + 1 :] -= errors[..., k : k + 1] * factor_BKK[:, k, None, k + 1 :]
        codes[..., k : k + 1] = code
    return codes, errors
