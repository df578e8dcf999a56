"""Values of heads from attended latents, between latent attention and o_proj."""

from torch import Tensor

from glm5.kernels.block_scaled import BLOCK
from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.row_codes import Kind, quantize

_FEW = 128  # rows up to which a kernel with quantization is faster than torch.bmm
TABLE = Table(
    __name__,
    triton=Impl(
        "up to 128 rows in 16 bits",
        on="triton",
        when=lambda out_THC, width: len(out_THC) <= _FEW and out_THC.element_size() == 2 and not width % BLOCK,
    ),
    reference=Impl("the library's batched product"),
)


def mla_values(out_THC: Tensor, w_HCV: Tensor, *, impl: str = "auto") -> Tensor:
    """Of attended latents [T, H, C], each head's values by its matrix [C, V]: [T, H * V]. `triton`: on a GPU.

    No gradient passes.
    """
    return TABLE.module(impl, out_THC, 0).mla_values(out_THC, w_HCV)


def mla_values_quantized(
    out_THC: Tensor, w_HCV: Tensor, kind: Kind = "blocks", *, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """`mla_values`, and `row_codes.quantize` of it."""
    if kind == "int8":
        values = mla_values(out_THC, w_HCV, impl=impl)
        return values, *quantize(values, kind)
    return TABLE.module(impl, out_THC, w_HCV.shape[2]).mla_values_quantized(out_THC, w_HCV)
