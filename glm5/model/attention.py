"""Latent attention (MLA) that reads only the keys an indexer picks (DSA). Model spec, section 3.3.

    q_lat = norm(x Wqa)    latent = [norm(x Wkva), rope(x Wkr)]    keys = indexer(x, q_lat)
    out   = concat_h( softmax(q_h . latent[keys] X^-1/2) latent[keys] Wv_h ) Wo

One class serves training, prefill and decode, in absorbed form: kv_b_proj is folded into the query and the output, so
a key is one latent row for all heads. What differs (where the latents live, which kernel reads them, whether heads have
keys of their own after all) is the `KVView`.
"""

import torch
from torch import Tensor, nn

from glm5.config.model import ModelConfig
from glm5.kernels.per_head import per_head
from glm5.model.indexer import Indexer
from glm5.model.linear import Linear
from glm5.model.norm import RMSNorm
from glm5.model.seams import KVView, Rope, Selection


class SparseLatentAttention(nn.Module):
    """Attention of one layer; has an `indexer` unless the layer shares an earlier layer's selection."""

    def __init__(self, cfg: ModelConfig, layer_idx: int):
        super().__init__()
        heads, rope_dim = cfg.num_attention_heads, cfg.qk_rope_head_dim
        self.cfg, self.layer_idx, self.qk_head_dim = cfg, layer_idx, cfg.qk_head_dim
        self.q_a_proj = Linear(cfg.hidden_size, cfg.q_lora_rank)
        self.q_a_layernorm = RMSNorm(cfg.q_lora_rank, cfg.lora_norm_eps)
        self.q_b_proj = Linear(cfg.q_lora_rank, heads * cfg.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(cfg.hidden_size, cfg.kv_lora_rank + rope_dim)
        self.kv_a_layernorm = RMSNorm(cfg.kv_lora_rank, cfg.lora_norm_eps)
        self.kv_b_proj = Linear(cfg.kv_lora_rank, heads * (cfg.qk_nope_head_dim + cfg.v_head_dim))
        self.o_proj = Linear(heads * cfg.v_head_dim, cfg.hidden_size)
        self.indexer = Indexer(cfg, layer_idx) if cfg.has_indexer(layer_idx) else None

    def forward(self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None) -> tuple[Tensor, Selection]:
        """Output [T, D] and the selection used: the given one, or, when it is None, the indexer's."""
        cfg, heads = self.cfg, self.cfg.num_attention_heads
        nope_dim, latent_dim = cfg.qk_nope_head_dim, cfg.kv_lora_rank
        q_lat_TQ = self.q_a_layernorm(self.q_a_proj(x_TD))
        q_THX = self.q_b_proj(q_lat_TQ).view(-1, heads, self.qk_head_dim)
        kv_TL = self.kv_a_proj_with_mqa(x_TD)

        w_k_HNC, w_v_HVC = self._key_and_value_weights(x_TD.dtype)
        q_THX = rope.part(q_THX, nope_dim, self.qk_head_dim)
        kv_TL = rope.part(kv_TL, latent_dim, latent_dim + cfg.qk_rope_head_dim)
        latent_TL = torch.cat([self.kv_a_layernorm(kv_TL[:, :latent_dim]), kv_TL[:, latent_dim:]], dim=-1)

        view.append_latent(self.layer_idx, latent_TL)
        if selection is None:
            selection = Selection(None) if view.reads_all else self.indexer(x_TD, q_lat_TQ, rope, view)
        # The scale belongs to the head width before absorption (X), not to the latent row.
        scale, heads_of = self.qk_head_dim**-0.5, (w_k_HNC, w_v_HVC)
        out_THV = view.attend_expanded(self.layer_idx, q_THX, *heads_of, selection, scale=scale)
        if out_THV is None:
            q_THL = absorbed(q_THX, w_k_HNC)
            out_THC = view.attend(self.layer_idx, q_THL, selection, scale=scale, value_dim=latent_dim)
            out_THV = per_head(out_THC, w_v_HVC.mT)
        return self.o_proj(out_THV.flatten(1)), selection

    def _key_and_value_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """kv_b_proj by heads: [H, N, C] for keys, [H, V, C] for values."""
        cfg = self.cfg
        kv_b_HOC = self.kv_b_proj.dense(dtype).view(cfg.num_attention_heads, -1, cfg.kv_lora_rank)
        return kv_b_HOC[:, : cfg.qk_nope_head_dim], kv_b_HOC[:, cfg.qk_nope_head_dim :]


def absorbed(q_THX: Tensor, w_k_HNC: Tensor) -> Tensor:
    """Queries that meet latents instead of keys: [T, H, N + R] to [T, H, C + R]."""
    nope_dim = w_k_HNC.shape[1]
    return torch.cat([per_head(q_THX[..., :nope_dim], w_k_HNC), q_THX[..., nope_dim:]], dim=-1)
