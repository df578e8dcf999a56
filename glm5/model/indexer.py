"""The lightning indexer: which keys is each query worth reading? (model spec, section 3.4)

    q = rope(q_lat Wq_b)    k = rope(layer_norm(x Wk))    w = (x Ww) J^-1/2
    score[t, s] = sum_j w[t, j] relu(q[t, j] . k[s] I^-1/2)        the top-k scores select the keys

Rotation takes the first R dimensions, the rest pass through (the opposite order of MLA). Selection passes no
gradient, so the inputs are detached: what the indexer learns, it learns from its own loss (index_loss.py).
"""

import torch
from torch import Tensor, nn

from glm5.config.model import ModelConfig
from glm5.model.linear import Linear
from glm5.model.seams import KVView, Rope, Selection

K_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Writes one key of `index_head_dim` per token and selects `index_topk` keys per query."""

    def __init__(self, cfg: ModelConfig, layer_idx: int):
        super().__init__()
        self.cfg, self.layer_idx = cfg, layer_idx
        self.wq_b = Linear(cfg.q_lora_rank, cfg.index_n_heads * cfg.index_head_dim)
        self.wk = Linear(cfg.hidden_size, cfg.index_head_dim)
        self.k_norm = nn.LayerNorm(cfg.index_head_dim, eps=K_NORM_EPS)
        self.weights_proj = Linear(cfg.hidden_size, cfg.index_n_heads)

    def forward(self, x_TD: Tensor, q_lat_TQ: Tensor, rope: Rope, view: KVView) -> Selection:
        """Select keys for layer input `x_TD` (after input_layernorm) and its normed query latent."""
        cfg = self.cfg
        x_TD, q_lat_TQ = x_TD.detach(), q_lat_TQ.detach()
        q_TJI = self.wq_b(q_lat_TQ).view(-1, cfg.index_n_heads, cfg.index_head_dim)
        key_TI = self._rotate(self.k_norm(self.wk(x_TD)), rope)
        view.append_index_key(self.layer_idx, key_TI)
        w_TJ = self.weights_proj(x_TD)
        w_TJ = w_TJ.to(torch.promote_types(w_TJ.dtype, torch.float32)) * cfg.index_n_heads**-0.5
        return view.select(self.layer_idx, self._rotate(q_TJI, rope), w_TJ, cfg.index_topk, cfg.index_head_dim**-0.5)

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        return rope.part(x, 0, self.cfg.qk_rope_head_dim)
