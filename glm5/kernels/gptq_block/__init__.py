"""Rounds a block of columns by GPTQ."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(
    __name__,
    triton=Impl("128 columns in one launch", on="triton", gradient=False),
    reference=Impl("the definition"),
)


def gptq_block(
    w_BOK: Tensor,
    factor_BKK: Tensor,
    scale_BOK: Tensor,
    *,
    quant_min: float,
    quant_max: float,
    fp8: bool,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(codes in w's dtype, errors over the factor's diagonal), [B, O, K] both. `factor_BKK`: upper triangular.

    `scale_BOK` has K columns or 1. Codes are whole numbers of `quant_min` to `quant_max`, or e4m3 numbers for `fp8`.
    """
    run = TABLE.module(impl, w_BOK, factor_BKK, scale_BOK).gptq_block
    return run(w_BOK, factor_BKK, scale_BOK, quant_min, quant_max, fp8=fp8)
