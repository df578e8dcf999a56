"""Latent attention over selected keys, as dense attention under a mask, tile by tile.

Every query is multiplied with all the latents that its tile sees, and a bias built from the keys hides what was not
selected. More arithmetic than gathering K latents per query and far less memory traffic: faster for training and
prefill at short contexts. The probabilities live in cache; backward computes them again:

    dV = p^T dout       dp = dout V^T       dlogits = p * (dp - sum_k p dp + dlse)       dq = dlogits latent * scale
"""

import torch
from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.tiles import Tile, TileReader, dense_logits, plan_tiles

# Not -inf: a row with nothing visible must stay free of NaN. exp(_HIDDEN - max) is zero next to any visible key.
_HIDDEN = -1e30


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
    """As `reference.sparse_mla`. The keys of a query must be distinct."""
    reader = TileReader(page_table_BN, latent_PZL.shape[1])
    tiles = plan_tiles(row_T, end_T, q_THL.shape[1])
    if isinstance(latent_PZL, Tensor):
        return _SparseMla.apply(q_THL, latent_PZL, keys_TK, end_T, scale, value_dim, tiles, reader)
    return _attend(q_THL, latent_PZL, keys_TK, end_T, scale, value_dim, tiles, reader)


class _SparseMla(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THL, latent_PZL, keys_TK, end_T, scale, value_dim, tiles: list[Tile], reader: TileReader):
        out_THC, lse_TH = _attend(q_THL, latent_PZL, keys_TK, end_T, scale, value_dim, tiles, reader)
        ctx.save_for_backward(q_THL, latent_PZL, keys_TK, end_T, lse_TH)
        ctx.scale, ctx.tiles, ctx.reader = scale, tiles, reader
        ctx.set_materialize_grads(False)
        return out_THC, lse_TH

    @staticmethod
    def backward(ctx, grad_out_THC: Tensor | None, grad_lse_TH: Tensor | None):
        q_THL, latent_PZL, keys_TK, end_T, lse_TH = ctx.saved_tensors
        wide = lse_TH.dtype
        grad_q, grad_latent = torch.zeros_like(q_THL), torch.zeros_like(latent_PZL, dtype=wide)
        empty_TH = lse_TH.isneginf()
        for tile in ctx.tiles:
            num_requests = len(tile.rows)
            latent_GSL = ctx.reader.read(latent_PZL, tile).to(wide)
            tile_q_THL = q_THL[tile.queries].to(wide)
            p_THS = _biased_logits(tile_q_THL, latent_GSL, keys_TK, end_T, tile, ctx.scale).softmax(dim=-1)
            p_GQS = p_THS.view(num_requests, -1, tile.num_keys)
            empty_T1S = empty_TH[tile.queries, :1].unsqueeze(-1)
            grad_logits, grad_values = torch.zeros_like(p_GQS), None
            if grad_out_THC is not None:
                grad_out_GQC = grad_out_THC[tile.queries].to(wide).masked_fill(empty_T1S, 0.0).flatten(0, 1)
                grad_out_GQC = grad_out_GQC.view(num_requests, -1, grad_out_THC.shape[-1])
                grad_p = torch.bmm(grad_out_GQC, latent_GSL[..., : grad_out_THC.shape[-1]].mT)
                grad_logits = torch.ops.aten._softmax_backward_data(grad_p, p_GQS, -1, wide)
                grad_values = torch.bmm(p_GQS.to(q_THL.dtype).to(wide).mT, grad_out_GQC)
            if grad_lse_TH is not None:
                grad_lse = grad_lse_TH[tile.queries].masked_fill(empty_T1S.squeeze(-1), 0.0)
                grad_logits = grad_logits.addcmul(p_GQS, grad_lse.reshape(num_requests, -1, 1))
            grad_q[tile.queries] = torch.bmm(grad_logits, latent_GSL).mul_(ctx.scale).view_as(tile_q_THL)
            grad_GSL = torch.bmm(grad_logits.mT, tile_q_THL.reshape(num_requests, -1, latent_GSL.shape[-1])).mul_(
                ctx.scale
            )
            if grad_values is not None:
                grad_GSL[..., : grad_values.shape[-1]] += grad_values
            ctx.reader.add(grad_latent, tile, grad_GSL)
        return grad_q, grad_latent.to(latent_PZL.dtype), None, None, None, None, None, None


def _attend(
    q_THL: Tensor,
    latent_PZL: Pool,
    keys_TK: Tensor | None,
    end_T: Tensor,
    scale: float,
    value_dim: int,
    tiles: list[Tile],
    reader: TileReader,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_THL.dtype, torch.float32)
    num_queries, num_heads, _ = q_THL.shape
    out_THC = q_THL.new_zeros(num_queries, num_heads, value_dim)
    lse_TH = q_THL.new_full((num_queries, num_heads), float("-inf"), dtype=wide)
    for tile in tiles:
        latent_GSL = reader.read(latent_PZL, tile).to(wide)
        logits_THS = _biased_logits(q_THL[tile.queries].to(wide), latent_GSL, keys_TK, end_T, tile, scale)
        p_THS = logits_THS.softmax(dim=-1)
        top_TH = logits_THS.amax(dim=-1)
        empty_T1 = top_TH[:, :1] < _HIDDEN / 2
        # log-sum-exp from the largest term: e^top / sum = p at the top.
        lse_TH[tile.queries] = (top_TH - p_THS.amax(dim=-1).log()).masked_fill_(empty_T1, float("-inf"))
        p_GQS = p_THS.view(len(tile.rows), -1, tile.num_keys).to(q_THL.dtype).to(wide)
        tile_THC = torch.bmm(p_GQS, latent_GSL[..., :value_dim]).view(-1, num_heads, value_dim)
        out_THC[tile.queries] = tile_THC.masked_fill_(empty_T1.unsqueeze(-1), 0.0)
    return out_THC, lse_TH


def _biased_logits(
    q_THL: Tensor, latent_GSL: Tensor, keys_TK: Tensor | None, end_T: Tensor, tile: Tile, scale: float
) -> Tensor:
    """q . latent * scale of a tile's queries, [T, H, S], and at most -1e30 where a key is not to be read."""
    num_keys = tile.num_keys
    logits_THS = dense_logits(q_THL, latent_GSL, scale)
    end_T1 = end_T[tile.queries, None]
    # Adding a bias is several times faster than masked_fill with a mask that broadcasts over heads.
    if keys_TK is None:
        hidden_TS = torch.arange(num_keys, device=end_T.device) >= end_T1
        bias_TS = torch.zeros_like(logits_THS[:, 0]).masked_fill_(hidden_TS, _HIDDEN)
    else:
        keys_TK = keys_TK[tile.queries].long()
        # What is not to be read lands in a column past the last key, which is then cut off.
        keys_TK = keys_TK.masked_fill((keys_TK < 0) | (keys_TK >= end_T1), num_keys)
        bias_TS = logits_THS.new_full((len(keys_TK), num_keys + 1), _HIDDEN).scatter_(1, keys_TK, 0.0)[:, :num_keys]
    return logits_THS.add_(bias_TS.unsqueeze(1))
