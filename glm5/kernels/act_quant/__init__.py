"""Dynamic FP8 quantization of activations."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(__name__, triton=Impl("one pass", on="triton", gradient=False), reference=Impl("the definition"))


def act_quant(x_TD: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """(x_fp8 [T, D] float8_e4m3fn, scale [T, ceil(D/128)] float32): scale = max(amax, 1e-4) / 448 per 128 values."""
    return TABLE.module(impl, x_TD).act_quant(x_TD)
