"""Quantization of activations with one scale per row."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.quantized_weight import Act

TABLE = Table(
    __name__,
    triton=Impl("one pass, a program a row", on="triton", gradient=False),
    reference=Impl("the definition"),
)


def token_quant(x_TD: Tensor, kind: Act, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """(codes [T, D] int8 or float8_e4m3fn, scale [T] float32; float64 for float64): scale = amax / 127, or / 448."""
    return TABLE.module(impl, x_TD).token_quant(x_TD, kind)
