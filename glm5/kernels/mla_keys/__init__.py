"""Norms, rotation and cache writes of latents and index keys, after the first projections of attention."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.mla_keys.index_keys import HeadWeights, IndexKeys, PlainLatents
from glm5.kernels.row_codes import Kind

__all__ = ["HeadWeights", "IndexKeys", "PlainLatents", "mla_keys", "mla_keys_quantized"]

TABLE = Table(__name__, triton=Impl("one launch", on="triton"), reference=Impl("the definition"))


def mla_keys(
    qkv_TY: Tensor,
    q_weight_Q: Tensor,
    kv_weight_C: Tensor,
    eps: float,
    cos_TR2: Tensor,
    sin_TR2: Tensor,
    slot_T: Tensor,
    latent_PZL: Pool,
    index: IndexKeys | None = None,
    *,
    plain: PlainLatents | None = None,
    impl: str = "auto",
) -> Tensor:
    """The query latent [T, Q], normed; writes each token's latent, and index key if requested, to its slot of the pool.

    `qkv_TY` [T, Q + C + R] is the product of the layer's input with q_a and kv_a, C the length of `kv_weight_C`.
    `slot_T` int64 as in `store_rows`; cos and sin as in `rope`. Mutates the pools, fills `plain`. No gradient passes.
    """
    where = cos_TR2, sin_TR2, slot_T, latent_PZL, index
    return TABLE.module(impl, qkv_TY).mla_keys(qkv_TY, q_weight_Q, kv_weight_C, eps, *where, plain=plain)[0]


def mla_keys_quantized(
    qkv_TY: Tensor,
    q_weight_Q: Tensor,
    kv_weight_C: Tensor,
    eps: float,
    cos_TR2: Tensor,
    sin_TR2: Tensor,
    slot_T: Tensor,
    latent_PZL: Pool,
    index: IndexKeys | None = None,
    kind: Kind = "blocks",
    *,
    plain: PlainLatents | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(query latent, codes, scale): `mla_keys`, and `row_codes.quantize` of its result for products that read it."""
    where = cos_TR2, sin_TR2, slot_T, latent_PZL, index
    run = TABLE.module(impl, qkv_TY).mla_keys
    return run(qkv_TY, q_weight_Q, kv_weight_C, eps, *where, plain=plain, kind=kind)
