"""Latent attention over selected keys, gathered for some queries at a time, also in backward, for long contexts.

    dp = dout . latent[:C]      dlogits = p * (dp - sum_k p dp + dlse)      dq = scale dlogits latent
    dlatent[key[t, k]] += scale dlogits q  +  p dout  in the first C values

Saved for backward are the inputs and lse, but no gathered latents or probabilities. Those are recomputed chunk by
chunk, so memory grows with T (H L + K), not with T K L.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.paging import key_slots, read_rows
from glm5.kernels.sparse_mla.reference import attend, queries_at_a_time


def sparse_mla(
    q_THL: Tensor,
    latent_PZL: Pool,
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """As `reference.sparse_mla`. Over FP8 latents without a gradient."""
    where = (page_table_BN, row_T, end_T)
    if isinstance(latent_PZL, Tensor):
        return _Chunked.apply(q_THL, latent_PZL, keys_TK, *where, scale, value_dim)
    with torch.no_grad():
        return _forward(q_THL, latent_PZL, keys_TK, *where, scale, value_dim)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THL, latent_PZL, keys_TK, page_table_BN, row_T, end_T, scale: float, value_dim: int):
        out_THC, lse_TH = _forward(q_THL, latent_PZL, keys_TK, page_table_BN, row_T, end_T, scale, value_dim)
        ctx.save_for_backward(q_THL, latent_PZL, keys_TK, page_table_BN, row_T, end_T, lse_TH)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return out_THC, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_THC: Tensor | None, grad_lse_TH: Tensor | None):
        q_THL, latent_PZL, keys_TK, page_table_BN, row_T, end_T, lse_TH = ctx.saved_tensors
        wide = lse_TH.dtype
        grad_q, grad_latent = torch.zeros_like(q_THL), torch.zeros_like(latent_PZL, dtype=wide)
        for part, slots_TK, hidden_TK in _chunks(q_THL, latent_PZL, keys_TK, page_table_BN, row_T, end_T):
            latent_TKL = read_rows(latent_PZL, slots_TK).masked_fill(hidden_TK[..., None], 0.0).to(wide)
            wide_q_THL = q_THL[part].to(wide)
            hidden_T1K = hidden_TK.unsqueeze(1)
            logits_THK = torch.einsum("thl,tkl->thk", wide_q_THL, latent_TKL).mul_(ctx.scale)
            # Where nothing is visible lse is -inf and every key hidden.
            p_THK = logits_THK.sub_(lse_TH[part, :, None]).exp_().masked_fill_(hidden_T1K, 0.0)
            grad_logits = torch.zeros_like(p_THK)
            grad_rows = torch.zeros_like(latent_TKL)
            if grad_out_THC is not None:
                grad_out = grad_out_THC[part].to(wide)
                value_dim = grad_out.shape[-1]
                grad_p = torch.einsum("thc,tkc->thk", grad_out, latent_TKL[..., :value_dim])
                grad_logits = torch.ops.aten._softmax_backward_data(grad_p, p_THK, -1, wide)
                grad_rows[..., :value_dim] = torch.einsum("thk,thc->tkc", p_THK.to(q_THL.dtype).to(wide), grad_out)
            if grad_lse_TH is not None:
                empty_T11 = hidden_TK.all(dim=-1)[:, None, None]
                grad_logits = grad_logits.addcmul(p_THK, grad_lse_TH[part, :, None].masked_fill(empty_T11, 0.0))
            grad_logits.mul_(ctx.scale)
            grad_q[part] = torch.einsum("thk,tkl->thl", grad_logits, latent_TKL)
            grad_rows += torch.einsum("thk,thl->tkl", grad_logits, wide_q_THL)
            grad_latent.flatten(0, 1).index_add_(0, slots_TK.flatten(), grad_rows.flatten(0, 1))
        return grad_q, grad_latent.to(latent_PZL.dtype), None, None, None, None, None, None


def _forward(q_THL, latent_PZL: Pool, keys_TK, page_table_BN, row_T, end_T, scale: float, value_dim: int):
    out_THC = q_THL.new_empty(*q_THL.shape[:2], value_dim)
    lse_TH = q_THL.new_empty(q_THL.shape[:2], dtype=torch.promote_types(q_THL.dtype, torch.float32))
    for part, slots_TK, hidden_TK in _chunks(q_THL, latent_PZL, keys_TK, page_table_BN, row_T, end_T):
        out_THC[part], lse_TH[part] = attend(q_THL[part], latent_PZL, slots_TK, hidden_TK, scale, value_dim)
    return out_THC, lse_TH


def _chunks(q_THL: Tensor, latent_PZL: Pool, keys_TK: Tensor | None, page_table_BN, row_T, end_T):
    """Chunks of queries as (slice, slots of their keys, mask of keys that are hidden)."""
    page_size = latent_PZL.shape[1]
    num_keys = page_table_BN.shape[1] * page_size if keys_TK is None else keys_TK.shape[1]
    step = queries_at_a_time(q_THL, num_keys)
    for start in range(0, len(q_THL), step):
        part = slice(start, start + step)
        if keys_TK is None:
            keys = torch.arange(num_keys, device=q_THL.device).expand(len(q_THL[part]), -1)
        else:
            keys = keys_TK[part]
        hidden_TK = (keys < 0) | (keys >= end_T[part, None])
        yield part, key_slots(keys.masked_fill(hidden_TK, 0), page_table_BN, row_T[part], page_size), hidden_TK
