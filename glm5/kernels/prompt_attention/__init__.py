"""Causal attention within prompts, with keys and values of heads expanded from latents."""

from torch import Tensor

from glm5.kernels.act_quant import act_quant
from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.prompt_attention import cuda

TABLE = Table(
    __name__,
    cuda=Impl(
        "heads as GLM-5 has them, in bfloat16",
        on="hopper",
        when=lambda *x: not cuda.refusal(*x),
        gradient=False,
    ),
    triton=Impl("any heads", on="triton", gradient=False),
    reference=Impl("the definition"),
)


def prompt_attention(
    q_THX: Tensor,
    k_THN: Tensor,
    rope_TR: Tensor,
    v_THV: Tensor,
    first_T: Tensor,
    *,
    scale: float,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] float32, natural log): token t sees tokens first_T[t]..t of the pass.

    `first_T` int32: the index, in the pass, of the first token of each token's request. For a padding row it is past
    the row, which then sees nothing and gives zeros and -inf. `k_THN` and `v_THV` may be strided views of one tensor.
    If every visible key is read, this takes less than half the operations of `sparse_mla` over latents.
    `cuda`: on Hopper, for GLM-5's head sizes, in bfloat16.
    """
    run = TABLE.module(impl, q_THX, k_THN, rope_TR, v_THV).prompt_attention
    return run(q_THX, k_THN, rope_TR, v_THV, first_T, scale=scale)


def prompt_attention_quantized(
    q_THX: Tensor,
    k_THN: Tensor,
    rope_TR: Tensor,
    v_THV: Tensor,
    first_T: Tensor,
    *,
    scale: float,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [T, H * V], codes, scale): `prompt_attention`, and `act_quant` of it for linear layers that read it.

    `cuda` does not write `out`: it returns an uninitialized tensor of the same shape and dtype.
    """
    module, given = TABLE.module(impl, q_THX, k_THN, rope_TR, v_THV), (q_THX, k_THN, rope_TR, v_THV, first_T)
    if module is cuda:
        placeholder = v_THV.new_empty(len(v_THV), v_THV.shape[1] * v_THV.shape[2])
        return placeholder, *cuda.prompt_attention_quantized(*given, scale=scale)
    out_TV = module.prompt_attention(*given, scale=scale)[0].flatten(1)
    return out_TV, *act_quant(out_TV)
