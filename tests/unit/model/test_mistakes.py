"""Controls of the parity test: each mistake that implementations of this architecture make must move the logits.

The comparison and its budget are those of test_transformers.py. A mistake is switched on for one run; a control that
stayed within the budget would mean that the parity test cannot see it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from glm5.kernels.index_score import index_score
from glm5.kernels.router import router
from glm5.kernels.top_k import top_k as best_keys
from glm5.model import Glm5, packed
from glm5.model.attention import SparseLatentAttention
from glm5.model.indexer import Indexer
from glm5.model.packed import PackedView
from glm5.model.seams import Rope, Selection
from tests.support.parity import BUDGET, MIN_GAP, Pair, build_pair

Patch = pytest.MonkeyPatch


def half_split(rope: Rope, x: Tensor, start: int, stop: int) -> Tensor:
    cos, sin = rope.cos_TR2, rope.sin_TR2
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x[..., start:stop].chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([x[..., :start], rotated, x[..., stop:]], dim=-1)


def indexer_half_split(model: Glm5, patch: Patch) -> None:
    def rotate(self: Indexer, x: Tensor, rope: Rope) -> Tensor:
        return half_split(rope, x, 0, self.cfg.qk_rope_head_dim)

    patch.setattr(Indexer, "_rotate", rotate)


def mla_half_split(model: Glm5, patch: Patch) -> None:
    right = Rope.part

    def rotate(self: Indexer, x: Tensor, rope: Rope) -> Tensor:
        return right(rope, x, 0, self.cfg.qk_rope_head_dim)

    patch.setattr(Rope, "part", half_split)
    patch.setattr(Indexer, "_rotate", rotate)


def indexer_rotates_last(model: Glm5, patch: Patch) -> None:
    def rotate(self: Indexer, x: Tensor, rope: Rope) -> Tensor:
        return rope.part(x, x.shape[-1] - self.cfg.qk_rope_head_dim, x.shape[-1])

    patch.setattr(Indexer, "_rotate", rotate)


def for_each_attention(model: Glm5, change: Callable[[SparseLatentAttention], None]) -> None:
    for layer in model.model.layers:
        change(layer.self_attn)


def swap_parts_of_heads(weight: Tensor, num_heads: int, first: int) -> None:
    """Read each head as (last rows, first `first` rows): what an implementation with the other order would see."""
    rows = weight.unflatten(0, (num_heads, -1))
    weight.copy_(torch.cat([rows[:, first:], rows[:, :first]], dim=1).flatten(0, 1))


def query_rope_before_nope(model: Glm5, patch: Patch) -> None:
    cfg = model.cfg
    for_each_attention(
        model, lambda a: swap_parts_of_heads(a.q_b_proj.weight, cfg.num_attention_heads, cfg.qk_rope_head_dim)
    )


def kv_value_before_key(model: Glm5, patch: Patch) -> None:
    cfg = model.cfg
    for_each_attention(
        model, lambda a: swap_parts_of_heads(a.kv_b_proj.weight, cfg.num_attention_heads, cfg.v_head_dim)
    )


def indexer_reads_unnormed_query(model: Glm5, patch: Patch) -> None:
    def change(attention: SparseLatentAttention) -> None:
        if attention.indexer is not None:
            attention.indexer.register_forward_pre_hook(
                lambda _, args: (args[0], attention.q_a_proj(args[0]), *args[2:])
            )

    for_each_attention(model, change)


def score_with(patch: Patch, score: Callable[..., Tensor]) -> None:
    def select(*args: Tensor, top_k: int, scale: float) -> Tensor:
        return best_keys(score(*args, scale=scale), top_k)

    patch.setattr(packed, "select_keys", select)


def no_relu(model: Glm5, patch: Patch) -> None:
    def score(q_TJI, key_PZI, w_TJ, page_table_BN, row_T, end_T, *, scale):
        # sum_j w_j (q_j . k) = relu(s) - relu(-s), so the right kernel gives it in two calls
        rest = (page_table_BN, row_T, end_T)
        negative = index_score(-q_TJI, key_PZI, w_TJ, *rest, scale=scale)
        return index_score(q_TJI, key_PZI, w_TJ, *rest, scale=scale) - negative.masked_fill(negative.isinf(), 0.0)

    score_with(patch, score)


def relu_on_head_weights(model: Glm5, patch: Patch) -> None:
    score_with(patch, lambda q, k, w, *rest, scale: index_score(q, k, w.relu(), *rest, scale=scale))


def top_k_before_masking(model: Glm5, patch: Patch) -> None:
    def select(self: PackedView, layer_idx, q_TJI, w_TJ, k, scale):
        everything = torch.full_like(self.end_T, self.max_len)
        score = index_score(q_TJI, self._index_key_PZI, w_TJ, self.page_table_BN, self.row_T, everything, scale=scale)
        return Selection(best_keys(score, k))

    patch.setattr(PackedView, "select", select)


def bias_in_expert_weights(model: Glm5, patch: Patch) -> None:
    def biased(x_TD, weight_ED, bias_E, *, norm_topk_prob, scaling_factor, **rest):
        chosen_TA = router(
            x_TD, weight_ED, bias_E, norm_topk_prob=norm_topk_prob, scaling_factor=scaling_factor, **rest
        )[1]
        score_TE = (x_TD.float() @ weight_ED.float().T).sigmoid() + bias_E
        weight_TA = score_TE.gather(1, chosen_TA.long())
        return weight_TA / weight_TA.sum(1, keepdim=True) * scaling_factor, chosen_TA

    patch.setattr("glm5.model.moe.router", biased)


def attend_with_width(width: Callable[[Glm5], int], model: Glm5, patch: Patch) -> None:
    right = PackedView.attend

    def attend(self, layer_idx, q_THL, selection, *, scale, value_dim):
        return right(self, layer_idx, q_THL, selection, scale=width(model) ** -0.5, value_dim=value_dim)

    patch.setattr(PackedView, "attend", attend)


def shared_expert_scaled(model: Glm5, patch: Patch) -> None:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "shared_experts"):
            layer.mlp.shared_experts.register_forward_hook(lambda *args: 2.5 * args[2])


def low_rank_eps(eps: float, model: Glm5, patch: Patch) -> None:
    def change(attention: SparseLatentAttention) -> None:
        attention.q_a_layernorm.eps = attention.kv_a_layernorm.eps = eps

    for_each_attention(model, change)


def all_eps_small(model: Glm5, patch: Patch) -> None:
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-6


def k_norm_eps(model: Glm5, patch: Patch) -> None:
    for_each_attention(model, lambda a: setattr(a.indexer.k_norm, "eps", 1e-5))


def gate_after_up(model: Glm5, patch: Patch) -> None:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            weight = layer.mlp.experts.gate_up_proj
            weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))


MISTAKES: dict[str, Callable[[Glm5, Patch], None]] = {
    "half-split rotation in the indexer": indexer_half_split,
    "half-split rotation in attention": mla_half_split,
    "query read as rope, nope": query_rope_before_nope,
    "kv_b read as value, key": kv_value_before_key,
    "indexer rotates its last dimensions": indexer_rotates_last,
    "indexer reads the query latent before its norm": indexer_reads_unnormed_query,
    "no relu in the index score": no_relu,
    "relu on the head weights": relu_on_head_weights,
    "top-k before the causal mask": top_k_before_masking,
    "bias left in the expert weights": bias_in_expert_weights,
    "softmax scale from the nope width": partial(attend_with_width, lambda m: m.cfg.qk_nope_head_dim),
    "softmax scale from the latent row": partial(
        attend_with_width, lambda m: m.cfg.kv_lora_rank + m.cfg.qk_rope_head_dim
    ),
    "shared expert scaled": shared_expert_scaled,
    "low-rank norms with 1e-5": partial(low_rank_eps, 1e-5),
    "every norm with 1e-6": all_eps_small,
    "up rows before gate rows": gate_after_up,
}


@contextmanager
def mistaken(pair: Pair, mistake: Callable[[Glm5, Patch], None]) -> Iterator[None]:
    """Our model with the mistake; it is spoilt for anything else afterwards."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        mistake(pair.ours, patch)
        yield


def clear_sequence(pair: Pair, length: int) -> list[int]:
    """A sequence none of whose choices could flip on a rounding error."""
    gen = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(2, 97, (length,), generator=gen).tolist()
        if pair.smallest_gap(ids) >= MIN_GAP:
            return ids


@pytest.mark.parametrize("name", MISTAKES)
def test_parity_notices(name):
    pair = build_pair({}, seed=7)
    ids = clear_sequence(pair, 48)
    want, _ = pair.witness(ids)
    assert (pair.ours.logits(ids) - want).abs().max() < BUDGET
    with mistaken(pair, MISTAKES[name]):
        assert (pair.ours.logits(ids) - want).abs().max() > BUDGET


def test_parity_notices_k_norm_epsilon():
    """With ordinary keys LayerNorm's epsilon drowns; keys of variance 1e-6, as of a barely trained wk, show it."""
    pair = build_pair({"index_topk": 4}, seed=7)
    with torch.no_grad():
        for model in (pair.ours, pair.theirs):
            for layer in model.model.layers:
                layer.self_attn.indexer.wk.weight.mul_(1e-3)
                layer.self_attn.indexer.k_norm.bias.mul_(10)
    ids = clear_sequence(pair, 48)
    want, _ = pair.witness(ids)
    assert (pair.ours.logits(ids) - want).abs().max() < BUDGET
    with mistaken(pair, k_norm_eps):
        assert (pair.ours.logits(ids) - want).abs().max() > BUDGET


@pytest.mark.parametrize("name", [name for name in MISTAKES if "index" in name or "top-k" in name])
def test_indexer_mistakes_are_invisible_while_all_keys_fit(name):
    """Why the parity cases must be longer than index_topk."""
    pair = build_pair({"index_topk": 48}, seed=7)
    ids = clear_sequence(pair, 48)
    want, _ = pair.witness(ids)
    with mistaken(pair, MISTAKES[name]):
        assert (pair.ours.logits(ids) - want).abs().max() < BUDGET
