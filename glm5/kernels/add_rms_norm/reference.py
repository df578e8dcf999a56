"""Residual add and norm between the blocks of a layer.

    sum = x + residual          out = rms_norm(sum, weight, eps)

Both are rounded to x's dtype, as by two separate ops.
"""

from torch import Tensor

from glm5.kernels.rms_norm import rms_norm
from glm5.kernels.row_codes import Kind, quantize


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(out, sum)."""
    total_TD = x_TD + residual_TD
    return rms_norm(total_TD, weight_D, eps), total_TD


def add_rms_norm_quantized(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, kind: Kind
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, sum, codes, scale)."""
    out_TD, total_TD = add_rms_norm(x_TD, residual_TD, weight_D, eps)
    return out_TD, total_TD, *quantize(out_TD, kind, impl="reference")
