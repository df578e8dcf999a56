"""Linear layer with the checkpoint's FP8 weights."""

import torch
from torch import Tensor

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.fp8_linear import cuda, scaled_mm

_FEW_ROWS = 16  # up to which Triton's kernels do not quantize x
MAX_TILED_ROWS = 128  # beyond, cuBLASLt's tiles are faster than ours (docs/performance-kernels.md)


def fp8_linear(
    x_TD: Tensor,
    weight: BlockScaled,
    quantized: tuple[Tensor, Tensor] | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """`x_TD` times the transpose of `weight` [O, D], [T, O] in x's dtype; x is quantized by `act_quant` first.

    `triton` does not quantize up to 16 rows, which is more accurate; `cuda` is for decoding on Hopper; `scaled_mm` is
    cuBLASLt. On a GPU `auto` chooses by the number of rows and the weight's shape.

    `quantized`: `act_quant(x_TD)`, if the caller has it.

    Inference only: backward raises RuntimeError. Raises ValueError if data and scale do not match (BlockScaled.check).
    """
    return TABLE.module(impl, x_TD, weight).fp8_linear(x_TD, weight, quantized)


def few_rows(device: torch.device) -> int:
    """The number of rows up to which `auto` does not quantize."""
    return cuda.MIN_TOKENS - 1 if cuda.runs_on(device) else _FEW_ROWS


def _fits_scaled_mm(x_TD: Tensor, weight: BlockScaled) -> bool:
    return len(x_TD) > MAX_TILED_ROWS and scaled_mm.refusal(weight, x_TD.dtype) is None


def _fits_cuda(x_TD: Tensor, weight: BlockScaled) -> bool:
    return cuda.is_faster(len(x_TD), *weight.data.shape) and not cuda.refusal(x_TD, weight)


TABLE = Table(
    __name__,
    scaled_mm=Impl("cuBLASLt, for more than 128 rows", on="triton", when=_fits_scaled_mm, gradient=False),
    cuda=Impl("5 to 128 rows, of shapes for which it is faster", on="hopper", when=_fits_cuda, gradient=False),
    triton=Impl("other numbers of rows; up to 16 are not quantized", on="triton", gradient=False),
    reference=Impl("the definition"),
)
