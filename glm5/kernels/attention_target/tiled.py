"""head_mean_probs tile by tile: logits stay in cache, and only those of selected keys are exponentiated."""

import torch
from torch import Tensor

from glm5.kernels.tiles import TileReader, dense_logits, plan_tiles


@torch.no_grad()
def head_mean_probs(
    q_THL: Tensor,
    latent_PZL: Tensor,
    keys_TK: Tensor | None,
    lse_TH: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
) -> Tensor:
    """As `reference.head_mean_probs`."""
    wide = torch.promote_types(q_THL.dtype, torch.float32)
    reader = TileReader(page_table_BN, latent_PZL.shape[1])
    num_keys = page_table_BN.shape[1] * latent_PZL.shape[1]
    target = q_THL.new_zeros(q_THL.shape[0], num_keys if keys_TK is None else keys_TK.shape[1], dtype=wide)
    for tile in plan_tiles(row_T, end_T, q_THL.shape[1]):
        latent_GSL = reader.read(latent_PZL, tile).to(wide)
        logits_THS = dense_logits(q_THL[tile.queries].to(wide), latent_GSL, scale)
        end_T1 = end_T[tile.queries, None]
        if keys_TK is None:
            keys, columns = torch.arange(tile.num_keys, device=end_T.device), slice(tile.num_keys)
        else:
            keys, columns = keys_TK[tile.queries].long(), slice(None)
            inside = keys.clamp(0, tile.num_keys - 1).unsqueeze(1).expand(-1, q_THL.shape[1], -1)
            logits_THS = logits_THS.gather(2, inside)
        p_THK = logits_THS.sub_(lse_TH[tile.queries].unsqueeze(-1)).exp_()
        target[tile.queries, columns] = p_THK.mean(dim=1).masked_fill_((keys < 0) | (keys >= end_T1), 0.0)
    return target
