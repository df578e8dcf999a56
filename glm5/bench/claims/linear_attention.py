"""Linear attention in place of MLA, for comparison with selected keys (GLM-5 report, section 2.1.2).

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        o_t = S_t q_t X^-1/2        |q_t| = |k_t| = 1

Gated DeltaNet (arXiv 2412.06464) makes q, k, v by a short convolution over the layer's own projections, alpha (decay)
and beta (rate of writing) of the layer's input, and gates its output. SimpleGDN has none of these, and no parameters of
its own: the pre-trained q, k and v go directly into the recurrence, with alpha = beta = 1. The report does not say what
alpha and beta are there; rotation is left out in both.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.model.attention import SparseLatentAttention
from glm5.model.packed import PackedView
from glm5.model.seams import KVView, Rope, Selection

CHUNK, TAPS = 64, 4
"""Tokens between which the state is handed on, and of a convolution."""


def gated_delta(q_BHTX: Tensor, k_BHTX: Tensor, v_BHTV: Tensor, decay_BHT: Tensor, beta_BHT: Tensor) -> Tensor:
    """Outputs [B, H, T, V] of the recurrence, by chunks; `decay` is log alpha. q and k are normalised here.

    In a chunk that begins with the state S, with g_t the sum of log alpha so far, the values that are written solve

        u_t = beta_t (v_t - exp(g_t) S k_t - sum_{s<t} exp(g_t - g_s) (k_t . k_s) u_s)        o_t from S and u_{s<=t}
    """
    num_tokens, width = q_BHTX.shape[2:]
    q_BHTX, k_BHTX = F.normalize(q_BHTX, dim=-1) * width**-0.5, F.normalize(k_BHTX, dim=-1)
    state_BHXV = v_BHTV.new_zeros(*k_BHTX.shape[:2], width, v_BHTV.shape[-1])
    out: list[Tensor] = []
    for at in range(0, num_tokens, CHUNK):
        q, k, v, decay, beta = (one[:, :, at : at + CHUNK] for one in (q_BHTX, k_BHTX, v_BHTV, decay_BHT, beta_BHT))
        g = decay.cumsum(dim=-1)
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        fall = (g[..., :, None] - g[..., None, :]).masked_fill(~seen, float("-inf")).exp()
        mixed = (beta[..., None] * fall * (k @ k.mT)).tril(-1)
        given = beta[..., None] * (v - g.exp()[..., None] * (k @ state_BHXV))
        written = torch.linalg.solve_triangular(mixed + torch.eye(q.shape[2]).to(q), given, upper=False)
        out.append(g.exp()[..., None] * (q @ state_BHXV) + (fall * (q @ k.mT)) @ written)
        left = (g[..., -1:] - g).exp()[..., None]
        state_BHXV = g[..., -1, None, None].exp() * state_BHXV + (left * k).mT @ written
    return torch.cat(out, dim=2)


class Gates(nn.Module):
    """What Gated DeltaNet adds to a layer: a convolution over the last tokens that begins as the identity, decay and
    rate of writing, and the gate and the norm of the output."""

    def __init__(self, attention: SparseLatentAttention) -> None:
        super().__init__()
        cfg = attention.cfg
        heads = cfg.num_attention_heads
        channels = heads * (2 * attention.qk_head_dim + cfg.v_head_dim)
        self.taps = nn.Parameter(F.one_hot(torch.tensor(TAPS - 1), TAPS).float().repeat(channels, 1))
        self.alpha_beta = nn.Linear(cfg.hidden_size, 2 * heads)
        self.gate = nn.Linear(cfg.hidden_size, heads * cfg.v_head_dim, bias=False)
        self.norm = nn.RMSNorm(cfg.v_head_dim, cfg.rms_norm_eps)
        with torch.no_grad():
            self.alpha_beta.bias.copy_(torch.cat([torch.full((heads,), -4.0), torch.zeros(heads)]))

    def convolved(self, x_BTHO: Tensor) -> Tensor:
        channels = x_BTHO.flatten(2).mT
        out = F.conv1d(F.pad(channels, (TAPS - 1, 0)), self.taps[:, None], groups=channels.shape[1])
        return F.silu(out).mT.reshape(x_BTHO.shape)


class LinearAttention(SparseLatentAttention):
    """With the projections of an attention layer: SimpleGDN, or with `gated` Gated DeltaNet, whose new parameters are
    in `own`. Sequences of a pass must be equally long."""

    def __init__(self, attention: SparseLatentAttention, *, gated: bool) -> None:
        super().__init__(attention.cfg, attention.layer_idx)
        self.load_state_dict(attention.state_dict())
        self.own = Gates(attention) if gated else None

    def forward(self, x_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None) -> tuple[Tensor, Selection]:
        """As `SparseLatentAttention.forward`; no keys are selected."""
        assert isinstance(view, PackedView), "whole sequences"
        cfg, rows, heads = self.cfg, view.num_rows, self.cfg.num_attention_heads
        q_THX = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))).unflatten(-1, (heads, -1))
        kv_TL = self.kv_a_proj_with_mqa(x_TD)
        kv_THO = self.kv_b_proj(self.kv_a_layernorm(kv_TL[:, : cfg.kv_lora_rank])).unflatten(-1, (heads, -1))
        nope_THN, v_THV = kv_THO.split([cfg.qk_nope_head_dim, cfg.v_head_dim], dim=-1)
        rope_THR = kv_TL[:, None, cfg.kv_lora_rank :].expand(-1, heads, -1)
        mixed_BTHO = torch.cat([q_THX, nope_THN, rope_THR, v_THV], dim=-1).unflatten(0, (rows, -1))
        decay_BHT = mixed_BTHO.new_zeros(*mixed_BTHO.shape[:3]).mT
        beta_BHT = torch.ones_like(decay_BHT)
        if self.own is not None:
            mixed_BTHO = self.own.convolved(mixed_BTHO)
            alpha_BHT, beta_BHT = self.own.alpha_beta(x_TD).unflatten(0, (rows, -1)).mT.chunk(2, dim=1)
            decay_BHT, beta_BHT = -F.softplus(alpha_BHT), beta_BHT.sigmoid()
        widths = [self.qk_head_dim, self.qk_head_dim, cfg.v_head_dim]
        q, k, v = (one.transpose(1, 2) for one in mixed_BTHO.split(widths, dim=-1))
        out_THV = gated_delta(q, k, v, decay_BHT, beta_BHT).transpose(1, 2).flatten(0, 1)
        if self.own is not None:
            out_THV = self.own.norm(out_THV) * F.silu(self.own.gate(x_TD)).view_as(out_THV)
        return self.o_proj(out_THV.flatten(1)), Selection(None)
