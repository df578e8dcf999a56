"""Latent attention over selected keys, as dense attention under a mask.

Every query of a request is multiplied with all of the request's latents, and a mask built from the keys hides what
was not selected. More arithmetic than gathering K latents per query and far less memory traffic: faster for training
and prefill at short contexts.
"""

import torch
from torch import Tensor

from glm5.kernels.paging import query_runs, request_keys


def selection_mask(keys_TK: Tensor | None, end_T: Tensor, num_keys: int) -> Tensor:
    """bool [T, S]: key s is visible to query t and, unless `keys_TK` is None, selected."""
    visible_TS = torch.arange(num_keys, device=end_T.device) < end_T[:, None]
    if keys_TK is None:
        return visible_TS
    # -1 lands in a column past the last key, which is then cut off.
    keys_TK = keys_TK.long().masked_fill(keys_TK < 0, num_keys)
    chosen_TS = torch.zeros(keys_TK.shape[0], num_keys + 1, dtype=torch.bool, device=end_T.device)
    return chosen_TS.scatter_(1, keys_TK, value=1)[:, :num_keys] & visible_TS


def sparse_mla(
    q_THL: Tensor,
    latent_PZL: Tensor,
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """As `reference.sparse_mla`. The keys of a query must be distinct."""
    wide = torch.promote_types(q_THL.dtype, torch.float32)
    num_heads = q_THL.shape[1]
    mask_TS = selection_mask(keys_TK, end_T, page_table_BN.shape[1] * latent_PZL.shape[1])
    outs, lses = [q_THL.new_zeros(0, num_heads, value_dim)], [q_THL.new_zeros(0, num_heads, dtype=wide)]
    for row, start, stop in query_runs(row_T):
        latent_SL = request_keys(latent_PZL, page_table_BN[row], int(end_T[start:stop].max())).to(wide)
        hidden_T1S = ~mask_TS[start:stop, None]
        empty_T11 = hidden_T1S.all(dim=-1, keepdim=True)
        logits_THS = q_THL[start:stop].to(wide) @ latent_SL.T * scale
        lse_TH1 = (
            logits_THS.masked_fill(hidden_T1S, float("-inf")).masked_fill(empty_T11, 0.0).logsumexp(-1, keepdim=True)
        )
        p_THS = (logits_THS - lse_TH1).exp().masked_fill(hidden_T1S, 0.0).to(q_THL.dtype)
        outs.append((p_THS.to(wide) @ latent_SL[:, :value_dim]).to(q_THL.dtype))
        lses.append(lse_TH1.masked_fill(empty_T11, float("-inf")).squeeze(-1))
    return torch.cat(outs), torch.cat(lses)
