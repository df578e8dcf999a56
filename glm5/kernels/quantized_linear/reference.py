"""x W^T with quantized W, and x quantized per token or not.

    y[t, o] = x_scale[t] * sum over groups g of  (x[t, g] . code[o, g]) * scale[o, g]

The dot product of a group is computed in float64, exactly if x is quantized, and rounded to float32; in float32, with
the same result, where that holds every partial sum. Scales, and the sum over groups in order, are float32 (float64 for
float64). So results do not depend on the matmul library or other rows.
"""

import torch
from torch import Tensor

from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.kernels.row_codes import Quantized
from glm5.kernels.token_quant import token_quant

_LARGEST_PRODUCT = 128 * 128  # of two int8 codes; float32 holds all integers up to 2**24


class _QuantizedLinear(torch.autograd.Function):
    """Forward only. A node of the graph all the same, so that training through it is an error and not a zero."""

    @staticmethod
    def forward(_ctx, x_TD: Tensor, codes: Tensor, scale: Tensor, weight_format, x_quantized) -> Tensor:
        weight, wide = QuantizedWeight(codes, scale, weight_format), torch.promote_types(x_TD.dtype, torch.float32)
        rows_TD, scale_T = x_TD, None
        if weight_format.act is not None:
            rows_TD, scale_T = x_quantized or token_quant(x_TD, weight_format.act, impl="reference")
        group = weight_format.group or weight.width
        is_narrow = weight_format.act == "int8" and min(group, weight.width) * _LARGEST_PRODUCT <= 2**24
        exact = torch.float32 if is_narrow else torch.float64
        rows_TD, values_OD = rows_TD.to(exact), weight.values(exact)
        y_TO = torch.zeros(len(x_TD), len(codes), dtype=wide, device=x_TD.device)
        for g, start in enumerate(range(0, weight.width, group)):
            stop = start + group
            y_TO += (rows_TD[:, start:stop] @ values_OD[:, start:stop].T).to(wide) * scale[:, g].to(wide)
        return (y_TO if scale_T is None else y_TO * scale_T[:, None]).to(x_TD.dtype)

    @staticmethod
    def backward(_ctx, *_grads: Tensor):
        raise RuntimeError(
            "quantized_linear has no gradient: to train, load the checkpoint dequantized, for example with "
            "dtype='bfloat16'"
        )


def quantized_linear(x_TD: Tensor, weight: QuantizedWeight, x_quantized: Quantized | None = None) -> Tensor:
    """[T, O] in x's dtype."""
    return _QuantizedLinear.apply(x_TD, *weight.check(), x_quantized)
