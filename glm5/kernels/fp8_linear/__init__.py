"""Linear layer with FP8 weights kept as they are in the checkpoint."""

from typing import Literal

import torch
from torch import Tensor

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.fp8_linear import cuda
from glm5.kernels.fp8_linear import scaled_mm as _scaled_mm
from glm5.kernels.fp8_linear.reference import fp8_linear as _reference
from glm5.kernels.triton_support import chosen

_FEW_ROWS = 16  # that Triton's kernels take as they are
MAX_TILED_ROWS = 128  # beyond, cuBLASLt's tiles are faster than ours (docs/performance-kernels.md)


def fp8_linear(
    x_TD: Tensor,
    weight: BlockScaled,
    quantized: tuple[Tensor, Tensor] | None = None,
    *,
    impl: Literal["auto", "reference", "triton", "scaled_mm", "cuda"] = "auto",
) -> Tensor:
    """`x_TD` times the transpose of `weight` [O, D], [T, O] in x's dtype; x is quantized by `act_quant` first.

    `triton` leaves x as it is for up to 16 rows, which is nearer to the exact product; `cuda` is for a step's rows on
    Hopper, `scaled_mm` cuBLASLt's. On a GPU `auto` takes these, by the number of rows and the weight's shape.

    `quantized`: `act_quant(x_TD)`, for those who have it already.

    Inference only: backward raises RuntimeError. Raises ValueError where data and scale do not fit (BlockScaled.check).
    """
    if impl == "auto":
        impl = _choose(x_TD, weight)
    if impl == "reference":
        return _reference(x_TD, weight, quantized)
    if impl == "triton":
        from glm5.kernels.fp8_linear.triton import fp8_linear as run

        return run(x_TD, weight, quantized)
    if impl == "scaled_mm":
        return _scaled_mm.fp8_linear(x_TD, weight, quantized)
    if impl == "cuda":
        return cuda.fp8_linear(x_TD, weight, quantized)
    raise unknown_impl("fp8_linear", impl, ("reference", "triton", "scaled_mm", "cuda"))


def few_rows(device: torch.device) -> int:
    """Up to so many rows are not quantized, so nobody need do it for them."""
    return cuda.MIN_TOKENS - 1 if cuda.runs_on(device) else _FEW_ROWS


def _choose(x_TD: Tensor, weight: BlockScaled) -> Literal["reference", "triton", "scaled_mm", "cuda"]:
    if not chosen(x_TD, weight.scale):
        return "reference"
    if len(x_TD) > MAX_TILED_ROWS and _scaled_mm.refusal(weight, x_TD.dtype) is None:
        return "scaled_mm"
    is_faster = cuda.is_faster(len(x_TD), *weight.data.shape)
    return "cuda" if is_faster and not cuda.refusal(x_TD, weight) else "triton"
