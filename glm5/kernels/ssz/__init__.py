"""Scales of least squared error for integers, from many starts."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.ssz.native import available

TABLE = Table(
    __name__,
    triton=Impl("a program a row", on="triton", when=lambda w: w.shape[-1] <= 1 << 14, gradient=False),
    native=Impl("C++, where a compiler is there", on="cpu", when=lambda _: available()),
    reference=Impl("the definition"),
)


def ssz(
    w_BOGI: Tensor,
    h_BGI: Tensor | None,
    *,
    quant_min: float,
    quant_max: float,
    starts: tuple[float, ...],
    steps: int,
    refine: int,
    impl: str = "auto",
) -> Tensor:
    """The scale [B, O, G] of w's rows of I elements with the least sum of h (w - scale q)^2 that steps lead to.

    Starts are factors of max|w| / quant_max. `h_BGI` >= 0 weighs elements alike in every one of O rows; None: 1.
    """
    return TABLE.module(impl, w_BOGI).ssz(w_BOGI, h_BGI, quant_min, quant_max, starts, steps, refine)
