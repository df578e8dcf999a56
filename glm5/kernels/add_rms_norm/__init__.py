"""Sum and norm of the residual stream, in one pass."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.row_codes import Kind

TABLE = Table(
    __name__,
    triton=Impl("one pass over the residual stream", on="triton", gradient=False, module=".rms_norm.triton"),
    reference=Impl("the definition"),
)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """(out, sum), [T, D] each: sum = x + residual and its `rms_norm`, both in x's dtype."""
    return TABLE.module(impl, x_TD, residual_TD, weight_D).add_rms_norm(x_TD, residual_TD, weight_D, eps)


def add_rms_norm_quantized(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, kind: Kind = "blocks", *, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, sum, codes, scale): `add_rms_norm`, and `row_codes.quantize` of out, for linear layers that read it."""
    run = TABLE.module(impl, x_TD, residual_TD, weight_D).add_rms_norm_quantized
    return run(x_TD, residual_TD, weight_D, eps, kind)
