"""The inputs of latent attention, one after the other (model spec 3.3 and 3.4):

[q, kv, r] = qkv            latent = [rms_norm(kv), rope(r)]         to its slot of the latents' pool
key = layer_norm(x)         key = [rope(key[:R]), key[R:]]           to its slot of the index keys' pool
result: rms_norm(q)
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.mla_keys.index_keys import IndexKeys, PlainLatents
from glm5.kernels.rms_norm import rms_norm
from glm5.kernels.rope import rope
from glm5.kernels.row_codes import Kind, quantize
from glm5.kernels.store_rows import store_rows


@torch.no_grad()
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
    kind: Kind | None = None,
) -> tuple[Tensor, ...]:
    """The query latent [T, Q] in qkv's dtype, then its codes and their scale, if they are requested."""
    rope_dim = 2 * cos_TR2.shape[1]
    q_TQ, kv_TC, rope_TR = qkv_TY.split([len(q_weight_Q), len(kv_weight_C), rope_dim], dim=-1)
    kv_TC = rms_norm(kv_TC, kv_weight_C, eps, impl="reference")
    rope_TR = rope(rope_TR, cos_TR2, sin_TR2, impl="reference")
    if plain is not None:
        plain.kv_TC.copy_(kv_TC)
        plain.rope_TR.copy_(rope_TR)
    store_rows(latent_PZL, slot_T, torch.cat([kv_TC, rope_TR], dim=-1), impl="reference")
    if index is not None and index.heads is not None:
        index.heads.out_TJ.copy_(F.linear(index.heads.x_TD, index.heads.weight_JD))
    if index is not None:
        x_TI = F.layer_norm(index.x_TI, index.weight_I.shape, index.weight_I, index.bias_I, index.eps)
        rotated_TR = rope(x_TI[:, :rope_dim], cos_TR2, sin_TR2, impl="reference")
        store_rows(index.pool_PZI, slot_T, torch.cat([rotated_TR, x_TI[:, rope_dim:]], dim=-1), impl="reference")
    q_TQ = rms_norm(q_TQ, q_weight_Q, eps, impl="reference")
    return (q_TQ,) if kind is None else (q_TQ, *quantize(q_TQ, kind, impl="reference"))
