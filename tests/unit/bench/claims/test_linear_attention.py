"""Linear attention by chunks against its recurrence in float64, token by token."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.bench.claims import linear_attention
from glm5.bench.claims.linear_attention import LinearAttention, gated_delta
from glm5.config.presets import preset
from glm5.model.attention import SparseLatentAttention
from glm5.model.packed import PackedView
from glm5.model.seams import Rope

SUM = 1e-12
"""Relative to the largest output: sums of a few hundred float64 in another order; 5e-16 was measured."""


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """S = alpha S (I - beta k k^T) + beta v k^T, o = S q X^-1/2."""
    q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
    state = v.new_zeros(*v.shape[:2], v.shape[-1], k.shape[-1])
    out = []
    for t in range(q.shape[2]):
        key, alpha, rate = k[:, :, t, :, None], decay[:, :, t, None, None].exp(), beta[:, :, t, None, None]
        state = alpha * (state - rate * (state @ key) @ key.mT) + rate * v[:, :, t, :, None] @ key.mT
        out.append((state @ q[:, :, t, :, None])[..., 0])
    return torch.stack(out, dim=2)


def inputs(num_tokens: int, *, simple: bool) -> list[Tensor]:
    gen = torch.Generator().manual_seed(num_tokens)
    shapes = [(2, 3, num_tokens, width) for width in (8, 8, 5)]
    qkv = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]
    decay, beta = (torch.rand(2, 3, num_tokens, generator=gen, dtype=torch.float64) for _ in range(2))
    return [*qkv, *((0 * decay, 0 * beta + 1) if simple else (-2 * decay, beta))]


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 150])
@pytest.mark.parametrize("simple", [True, False])
def test_outputs_and_gradients_are_those_of_the_recurrence(num_tokens, simple):
    given = [one.requires_grad_() for one in inputs(num_tokens, simple=simple)]
    ours, theirs = gated_delta(*given), recurrence(*given)
    assert (ours - theirs).abs().max() <= SUM * theirs.abs().max()
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = (torch.autograd.grad((out * weight).sum(), given[:3]) for out in (ours, theirs))
    for mine, its in zip(*pairs, strict=True):
        assert (mine - its).abs().max() <= 10 * SUM * max(1.0, its.abs().max().item())


def test_a_forgotten_decay_is_noticed():
    q, k, v, decay, beta = inputs(70, simple=False)
    ours, theirs = gated_delta(q, k, v, 0 * decay, beta), recurrence(q, k, v, decay, beta)
    assert (ours - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("gated", [True, False])
def test_a_layer_reads_its_own_sequence_up_to_its_own_token(gated, monkeypatch):
    monkeypatch.setattr(linear_attention, "CHUNK", 4)
    cfg = preset("tiny")
    torch.manual_seed(0)
    old = SparseLatentAttention(cfg, 0)
    for weight in old.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    layer, view = LinearAttention(old, gated=gated), PackedView([11, 11], stage="dense")
    rope = Rope.at(view.positions_T, cfg.qk_rope_head_dim, cfg.rope_theta, torch.zeros(1))
    x_TD = torch.randn(22, cfg.hidden_size)
    before = layer(x_TD, rope, view, None)[0]
    changed_TD = x_TD.clone()
    changed_TD[6] += 1.0
    differs_T = (layer(changed_TD, rope, view, None)[0] != before).any(dim=1)
    assert differs_T.tolist() == [6 <= at < 11 for at in range(22)]


def test_simple_gdn_is_the_recurrence_of_the_layers_own_queries_keys_and_values():
    cfg = preset("tiny")
    torch.manual_seed(1)
    old = SparseLatentAttention(cfg, 0)
    for weight in old.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    layer, view = LinearAttention(old, gated=False).double(), PackedView([9], stage="dense")
    old = old.double()
    x_TD = torch.randn(9, cfg.hidden_size, dtype=torch.float64)
    rope = Rope.at(view.positions_T, cfg.qk_rope_head_dim, cfg.rope_theta, x_TD)
    heads, out = cfg.num_attention_heads, []
    q = old.q_b_proj(old.q_a_layernorm(old.q_a_proj(x_TD))).view(9, heads, -1)
    latent = old.kv_a_proj_with_mqa(x_TD)
    kv = old.kv_b_proj(old.kv_a_layernorm(latent[:, : cfg.kv_lora_rank])).view(9, heads, -1)
    for head in range(heads):
        key = torch.cat([kv[:, head, : cfg.qk_nope_head_dim], latent[:, cfg.kv_lora_rank :]], dim=1)
        value, ones = kv[:, head, cfg.qk_nope_head_dim :], torch.ones(1, 1, 9, dtype=torch.float64)
        out.append(recurrence(q[None, None, :, head], key[None, None], value[None, None], 0 * ones, ones)[0, 0])
    want = old.o_proj(torch.cat(out, dim=1))
    got = layer(x_TD, rope, view, None)[0]
    assert (got - want).abs().max() <= SUM * want.abs().max()
