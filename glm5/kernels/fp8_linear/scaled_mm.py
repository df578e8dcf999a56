"""fp8_linear through cuBLASLt's block-scaled product, with `act_quant` before it: for many rows, on Hopper."""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import FP8, BlockScaled, num_blocks

_SCALE_ALIGNMENT = 4  # cuBLASLt reads rows of either scale in fours


def refusal(weight: BlockScaled, dtype: torch.dtype) -> str | None:
    """Why cuBLASLt does not support this product; None if it does."""
    rows, cols = weight.data.shape
    if weight.data.device.type != "cuda" or torch.cuda.get_device_capability(weight.data.device) != (9, 0):
        return f"needs a Hopper GPU, got {weight.data.device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {dtype}"
    if rows % 16 or cols % 16 or num_blocks(cols) % _SCALE_ALIGNMENT:
        return f"needs sizes in multiples of 16 and of {_SCALE_ALIGNMENT} blocks of columns, got [{rows}, {cols}]"
    return None


def fp8_linear(x_TD: Tensor, weight: BlockScaled, quantized: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """[T, O] in x's dtype. Raises ValueError where `refusal` has a reason."""
    if reason := refusal(weight.check(), x_TD.dtype):
        raise ValueError(f"fp8_linear[scaled_mm] {reason}; use impl='triton' or 'reference'")
    x_fp8, x_scale = quantized or act_quant(x_TD)
    missing = -len(x_TD) % _SCALE_ALIGNMENT
    x_fp8 = F.pad(x_fp8.view(torch.uint8), (0, 0, 0, missing)).view(FP8) if missing else x_fp8
    x_scale = F.pad(x_scale.T, (0, missing)) if missing else x_scale.T.contiguous()
    y_TO = F.scaled_mm(
        x_fp8,
        weight.data.T,
        x_scale.T,
        F.ScalingType.BlockWise1x128,
        weight.scale.T,
        F.ScalingType.BlockWise128x128,
        output_dtype=x_TD.dtype,
    )
    return y_TO[: len(x_TD)]
