"""x W^T with W in 128 x 128 block FP8 and x quantized on the fly (model spec 3.8).

    y[t, o] = sum over 128-blocks b of x:  (x_fp8[t, b] . w_fp8[o, b]) * x_scale[t, b] * w_scale[o, b]

Each block's dot product is exact, then rounded to float32; scales and the sum over blocks, in order, are float32. So
the result does not depend on the matmul library.
"""

import torch
from torch import Tensor

from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import BLOCK, BlockScaled


class _Fp8Linear(torch.autograd.Function):
    """Forward only. A node of the graph all the same, so that training through it is an error and not a zero."""

    @staticmethod
    def forward(_ctx, x_TD: Tensor, data: Tensor, scale: Tensor, quantized: tuple[Tensor, Tensor] | None) -> Tensor:
        x_fp8, x_scale = quantized or act_quant(x_TD, impl="reference")
        rows = data.shape[0]
        y_TO = torch.zeros(x_TD.shape[0], rows, dtype=torch.float32, device=x_TD.device)
        for block, start in enumerate(range(0, data.shape[1], BLOCK)):
            # e4m3 products span 2**-18 to 2**18: a sum of 128 needs 43 bits, which float64 holds exactly.
            dot_TO = x_fp8[:, start : start + BLOCK].double() @ data[:, start : start + BLOCK].double().T
            w_scale_O = scale[:, block].repeat_interleave(BLOCK)[:rows]
            y_TO += dot_TO.float() * x_scale[:, block, None] * w_scale_O
        return y_TO.to(x_TD.dtype)

    @staticmethod
    def backward(_ctx, *_grads: Tensor):
        raise RuntimeError(
            "fp8_linear has no gradient: to train, load the checkpoint dequantized, for example with dtype='bfloat16'"
        )


def fp8_linear(x_TD: Tensor, weight: BlockScaled, quantized: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """[T, O] in x's dtype."""
    return _Fp8Linear.apply(x_TD, *weight.check(), quantized)
