"""Attention of a prompt's tokens to one another, heads' keys and values expanded from the latents."""

from typing import Literal

from torch import Tensor

from glm5.kernels.block_scaled import BLOCK
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.prompt_attention.reference import prompt_attention as _reference
from glm5.kernels.row_codes import Kind, quantize
from glm5.kernels.triton_support import chosen

Impl = Literal["auto", "reference", "triton"]


def prompt_attention(
    q_THX: Tensor,
    k_THN: Tensor,
    rope_TR: Tensor,
    v_THV: Tensor,
    first_T: Tensor,
    *,
    scale: float,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] float32, natural log): token t sees tokens first_T[t]..t of the pass.

    `first_T` int32 is the index, in the pass, of the first token of each token's request; that of a padding row lies
    behind it: it sees nothing, which gives zeros and -inf. `k_THN` and `v_THV` may be strided pieces of one product.
    Where every visible key is read, this takes less than half the operations of `sparse_mla`, which never expands.
    """
    if _choose(impl, q_THX, k_THN, rope_TR, v_THV) == "reference":
        return _reference(q_THX, k_THN, rope_TR, v_THV, first_T, scale=scale)
    from glm5.kernels.prompt_attention.triton import prompt_attention as run

    return run(q_THX, k_THN, rope_TR, v_THV, first_T, scale=scale)


def prompt_attention_quantized(
    q_THX: Tensor,
    k_THN: Tensor,
    rope_TR: Tensor,
    v_THV: Tensor,
    first_T: Tensor,
    kind: Kind = "blocks",
    *,
    scale: float,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(heads' values side by side [T, H * V], codes, scale): `out` for products that read what `row_codes.quantize`
    makes of it.

    Where the kernel itself makes codes, something of the values' shape and dtype stands in for them.
    """
    given = q_THX, k_THN, rope_TR, v_THV, first_T
    chosen_impl = _choose(impl, *given[:4])
    if kind == "int8" or v_THV.shape[2] % BLOCK or chosen_impl == "reference":
        values_TV = prompt_attention(*given, scale=scale, impl=chosen_impl)[0].flatten(1)
        return values_TV, *quantize(values_TV, kind)
    from glm5.kernels.prompt_attention.triton import prompt_attention_quantized as run

    return run(*given, scale=scale)


def _choose(impl: Impl, *read: Tensor) -> Literal["reference", "triton"]:
    if impl == "auto":
        return "triton" if chosen(*read) else "reference"
    if impl not in ("reference", "triton"):
        raise unknown_impl("prompt_attention", impl, ("reference", "triton"))
    return impl
