"""GLM-5 from its formulas, in float64, for one sequence: expanded heads, loops, no cache, no kernels of ours.

Written apart from the package as an independent witness for what `transformers` does not have (MTP, the indexer's
loss) or does not do in float64 (gradients). Weights come as the state dict of our model.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.config.model import ModelConfig


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor, theta: float) -> Tensor:
    """Interleaved rotation of [T, ..., R], token t at position t, as a product of complex numbers."""
    T, R = x.shape[0], x.shape[-1]
    frequency = theta ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle).reshape(T, *[1] * (x.dim() - 2), R // 2)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


@dataclass
class Textbook:
    """`dense=True` attends to every earlier key; the indexer's loss is then over all of them."""

    cfg: ModelConfig
    weights: dict[str, Tensor]
    dense: bool = False
    scores: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    attention: list[list[Tensor]] = field(default_factory=list)

    def w(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"]

    def index(self, at: str, h: Tensor, q_lat: Tensor) -> Tensor:
        """Mask [T, T] of selected keys; notes the scores."""
        cfg, T = self.cfg, h.shape[0]
        h, q_lat, R = h.detach(), q_lat.detach(), cfg.qk_rope_head_dim
        q = (q_lat @ self.w(f"{at}.wq_b").T).view(T, cfg.index_n_heads, cfg.index_head_dim)
        k = F.layer_norm(
            h @ self.w(f"{at}.wk").T,
            (cfg.index_head_dim,),
            self.w(f"{at}.k_norm"),
            self.weights[f"{at}.k_norm.bias"],
            1e-6,
        )
        q = torch.cat([rotate(q[..., :R], cfg.rope_theta), q[..., R:]], -1)
        k = torch.cat([rotate(k[..., :R], cfg.rope_theta), k[..., R:]], -1)
        head_weight = h @ self.w(f"{at}.weights_proj").T * cfg.index_n_heads**-0.5
        hits = torch.einsum("qji,ki->qjk", q, k).mul(cfg.index_head_dim**-0.5).relu()
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        score = torch.einsum("qjk,qj->qk", hits, head_weight).masked_fill(~causal, float("-inf"))
        best = score.topk(min(cfg.index_topk, T), dim=-1).indices
        mask = causal if self.dense else torch.zeros_like(causal).scatter(1, best, True) & causal
        self.scores.append(score)
        self.masks.append(mask)
        self.attention.append([])
        return mask

    def attend(self, at: str, h: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        cfg, T, H = self.cfg, h.shape[0], self.cfg.num_attention_heads
        N, R, V, C = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim, cfg.kv_lora_rank
        q_lat = norm(h @ self.w(f"{at}.q_a_proj").T, self.w(f"{at}.q_a_layernorm"), cfg.lora_norm_eps)
        q = (q_lat @ self.w(f"{at}.q_b_proj").T).view(T, H, N + R)
        latent, k_rope = (h @ self.w(f"{at}.kv_a_proj_with_mqa").T).split([C, R], dim=-1)
        latent = norm(latent, self.w(f"{at}.kv_a_layernorm"), cfg.lora_norm_eps)
        k_nope, value = (latent @ self.w(f"{at}.kv_b_proj").T).view(T, H, N + V).split([N, V], dim=-1)
        if mask is None:
            mask = self.index(f"{at}.indexer", h, q_lat)
        q_rope, k_rope = rotate(q[..., N:], cfg.rope_theta), rotate(k_rope, cfg.rope_theta)
        logits = torch.einsum("qhn,khn->hqk", q[..., :N], k_nope) + torch.einsum("qhr,kr->hqk", q_rope, k_rope)
        probs = (logits * (N + R) ** -0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        self.attention[-1].append(probs.mean(0).detach())
        return torch.einsum("hqk,khv->qhv", probs, value).reshape(T, H * V) @ self.w(f"{at}.o_proj").T, mask

    def mlp(self, at: str, h: Tensor) -> Tensor:
        gate, up = h @ self.w(f"{at}.gate_proj").T, h @ self.w(f"{at}.up_proj").T
        return F.silu(gate) * up @ self.w(f"{at}.down_proj").T

    def experts(self, at: str, h: Tensor) -> Tensor:
        cfg = self.cfg
        p = (h @ self.w(f"{at}.gate").T).sigmoid()
        chosen = (p + self.weights[f"{at}.gate.e_score_correction_bias"]).topk(cfg.num_experts_per_tok).indices
        weight = p.gather(1, chosen)
        weight = weight / (weight.sum(1, keepdim=True) + 1e-20) * cfg.routed_scaling_factor
        gate_up, down = self.weights[f"{at}.experts.gate_up_proj"], self.weights[f"{at}.experts.down_proj"]
        rows = []
        for x, ids, ws in zip(h, chosen.tolist(), weight, strict=True):
            gated = [gate_up[e] @ x for e in ids]
            outs = [down[e] @ (F.silu(g[: len(g) // 2]) * g[len(g) // 2 :]) for e, g in zip(ids, gated, strict=True)]
            rows.append(sum(w * out for w, out in zip(ws, outs, strict=True)))
        return torch.stack(rows) + self.mlp(f"{at}.shared_experts", h)

    def layer(self, i: int, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        cfg, at = self.cfg, f"model.layers.{i}"
        out, mask = self.attend(f"{at}.self_attn", norm(x, self.w(f"{at}.input_layernorm"), cfg.rms_norm_eps), mask)
        x = x + out
        h = norm(x, self.w(f"{at}.post_attention_layernorm"), cfg.rms_norm_eps)
        return x + (self.experts if cfg.is_moe(i) else self.mlp)(f"{at}.mlp", h), mask

    def hidden(self, ids: Tensor) -> Tensor:
        """After model.norm, [T, D]."""
        x, mask = self.w("model.embed_tokens")[ids], None
        for i in range(self.cfg.num_hidden_layers):
            x, mask = self.layer(i, x, None if self.cfg.has_indexer(i) else mask)
        return norm(x, self.w("model.norm"), self.cfg.rms_norm_eps)

    def draft(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """MTP hidden states after shared_head.norm, [T, D]."""
        cfg, at = self.cfg, f"model.layers.{self.cfg.num_hidden_layers}"
        embed = norm(self.w("model.embed_tokens")[next_ids], self.w(f"{at}.enorm"), cfg.rms_norm_eps)
        hidden = norm(hidden, self.w(f"{at}.hnorm"), cfg.rms_norm_eps)
        x, _ = self.layer(cfg.num_hidden_layers, torch.cat([embed, hidden], -1) @ self.w(f"{at}.eh_proj").T, None)
        return norm(x, self.w(f"{at}.shared_head.norm"), cfg.rms_norm_eps)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.w("lm_head").T

    def index_loss(self) -> Tensor:
        """Mean over indexers and queries of KL(head-averaged attention || softmax of the scores), row by row."""
        losses = []
        for score, mask, served in zip(self.scores, self.masks, self.attention, strict=True):
            target = torch.stack(served).mean(0)
            for p, s, visible in zip(target, score, mask, strict=True):
                p, log_q = p[visible], s[visible].log_softmax(0)
                losses.append((p * (p.log() - log_q)).sum())
        return torch.stack(losses).mean()
