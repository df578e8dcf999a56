"""Attention of a prompt's tokens to one another, heads' keys and values expanded from the latents."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.prompt_attention import cuda
from glm5.kernels.prompt_attention.reference import prompt_attention as _reference
from glm5.kernels.triton_support import chosen


def prompt_attention(
    q_THX: Tensor,
    k_THN: Tensor,
    rope_TR: Tensor,
    v_THV: Tensor,
    first_T: Tensor,
    *,
    scale: float,
    impl: Literal["auto", "reference", "triton", "cuda"] = "auto",
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] float32, natural log): token t sees tokens first_T[t]..t of the pass.

    `first_T` int32 is the index, in the pass, of the first token of each token's request; that of a padding row lies
    behind it: it sees nothing, which gives zeros and -inf. `k_THN` and `v_THV` may be strided pieces of one product.
    Where every visible key is read, this takes less than half the operations of `sparse_mla`, which never expands.
    `cuda`: on Hopper, for heads as GLM-5 has them, in bfloat16.
    """
    if impl == "auto":
        impl = "reference"
        if chosen(q_THX, k_THN, rope_TR, v_THV):
            impl = "triton" if cuda.refusal(q_THX, k_THN, rope_TR, v_THV) else "cuda"
    if impl == "reference":
        return _reference(q_THX, k_THN, rope_TR, v_THV, first_T, scale=scale)
    if impl == "triton":
        from glm5.kernels.prompt_attention.triton import prompt_attention as run

        return run(q_THX, k_THN, rope_TR, v_THV, first_T, scale=scale)
    if impl == "cuda":
        return cuda.prompt_attention(q_THX, k_THN, rope_TR, v_THV, first_T, scale=scale)
    raise unknown_impl("prompt_attention", impl, ("reference", "triton", "cuda"))
