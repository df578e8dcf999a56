"""What stands between latent attention and the product behind it: each head's values, side by side."""

from typing import Literal

from torch import Tensor

from glm5.kernels.block_scaled import BLOCK
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.mla_values.reference import mla_values as _reference
from glm5.kernels.row_codes import Kind, quantize
from glm5.kernels.triton_support import chosen

_FEW = 128  # rows up to which the library's product takes longer than a kernel that quantizes along the way
Impl = Literal["auto", "reference", "triton"]


def mla_values(out_THC: Tensor, w_HCV: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Of attended latents [T, H, C], each head's values by its matrix [C, V]: [T, H * V]. `triton`: on a GPU.

    No gradient passes.
    """
    if _choose(impl, out_THC, fits=True) == "reference":
        return _reference(out_THC, w_HCV)
    from glm5.kernels.mla_values.triton import mla_values as run

    return run(out_THC, w_HCV, quantize=False)[0]


def mla_values_quantized(
    out_THC: Tensor, w_HCV: Tensor, kind: Kind = "blocks", *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, then what `row_codes.quantize` makes of it."""
    if kind == "int8":
        values = mla_values(out_THC, w_HCV, impl=impl)
        return values, *quantize(values, kind)
    if _choose(impl, out_THC, fits=w_HCV.shape[2] % BLOCK == 0) == "reference":
        values = _reference(out_THC, w_HCV)
        return values, *quantize(values, kind)
    from glm5.kernels.mla_values.triton import mla_values as run

    return run(out_THC, w_HCV, quantize=True)


def _choose(impl: Impl, out_THC: Tensor, *, fits: bool) -> Literal["reference", "triton"]:
    if impl == "auto":
        is_step = len(out_THC) <= _FEW and out_THC.element_size() == 2
        return "triton" if fits and is_step and chosen(out_THC.detach()) else "reference"
    if impl not in ("reference", "triton"):
        raise unknown_impl("mla_values", impl, ("reference", "triton"))
    return impl
