"""Our model and the one in `transformers` with the same random weights, and the choices that each made.

A choice (selected keys, routed experts) can flip on a rounding error when two candidates score alike. Rows whose gap
is below `MIN_GAP` are therefore compared with the witness's choices forced upon our model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from glm5.config.model import ModelConfig
from glm5.kernels.index_score import index_score
from glm5.model import Glm5
from glm5.model.packed import PackedView
from glm5.model.seams import Selection

MIN_GAP = 1e-5
BUDGET = 1e-4  # max abs difference of fp32 logits of unit scale; 8 times the 1.3e-5 measured
SCORE_SPREAD = 4.0  # scores of a few units, as trained indexers have them: at unit scale a row in 2000 has a near-tie

BASE: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "float32",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "index_topk": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": [1],
    "pad_token_id": 0,
    "num_nextn_predict_layers": 0,
}


def build_pair(changes: dict[str, Any], seed: int, reference_changes: dict[str, Any] | None = None) -> "Pair":
    """Both models with one set of random weights. `reference_changes`: keys that transformers must read differently."""
    ours = Glm5(ModelConfig.from_dict(BASE | changes)).eval()
    theirs_cfg = GlmMoeDsaConfig(**(BASE | changes | (reference_changes or {})))
    theirs_cfg._attn_implementation = theirs_cfg._experts_implementation = "eager"
    theirs = GlmMoeDsaForCausalLM(theirs_cfg).eval()
    randomize(theirs, seed)
    ours.load_state_dict(theirs.state_dict())
    return Pair(ours, theirs)


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Norms and biases away from their neutral values; small inputs to the norms, so that their epsilons show."""
    gen = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=gen, dtype=torch.float32).to(tensor.dtype)
        if name.endswith("norm.weight"):
            tensor.copy_(1 + 0.2 * noise)
        elif name.endswith(("norm.bias", "e_score_correction_bias", "embed_tokens.weight")):
            tensor.copy_(0.1 * noise)
        elif name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
            tensor.copy_(0.1 * noise * tensor.shape[-1] ** -0.5)
        elif name.endswith("weights_proj.weight"):
            tensor.copy_(noise * SCORE_SPREAD * tensor.shape[-1] ** -0.5)
        else:
            tensor.copy_(noise * tensor.shape[-1] ** -0.5)


@dataclass
class Choices:
    """What one run chose: per indexer layer the selected keys as a mask [T, T], per MoE layer (weights, experts)."""

    selected: list[Tensor] = field(default_factory=list)
    routed: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class Pair:
    ours: Glm5
    theirs: GlmMoeDsaForCausalLM

    @torch.no_grad()
    def witness(self, ids: list[int]) -> tuple[Tensor, Choices]:
        """Logits [T, W] of transformers on one sequence, and its choices."""
        choices = Choices()

        def on_indexer(module: nn.Module, args: tuple, topk_1TK: Tensor) -> None:
            T = topk_1TK.shape[1]
            mask_TT = torch.zeros(T, T, dtype=torch.bool).scatter(1, topk_1TK[0].long(), True)
            choices.selected.append(mask_TT.tril())

        def on_router(module: nn.Module, args: tuple, out: tuple[Tensor, Tensor, Tensor]) -> None:
            choices.routed.append((out[1], out[2].int()))

        hooks = []
        for layer in self.theirs.model.layers:
            if layer.self_attn.indexer is not None:
                hooks.append(layer.self_attn.indexer.register_forward_hook(on_indexer))
            if hasattr(layer.mlp, "gate"):
                hooks.append(layer.mlp.gate.register_forward_hook(on_router))
        try:
            return self.theirs(torch.tensor([ids])).logits[0], choices
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def smallest_gap(self, ids: list[int]) -> float:
        """Distance of our run from a different choice: over all rows, best refused against worst chosen."""
        view = GapView([len(ids)])
        with recorded_router_gaps(self.ours) as gaps:
            self.ours(torch.tensor(ids), view)
        return min([float("inf"), *view.gaps, *gaps])

    @torch.no_grad()
    def forced(self, ids: list[int], choices: Choices) -> Tensor:
        """Our logits with the witness's keys and experts."""
        routed = iter(choices.routed)
        hooks = [r.register_forward_hook(lambda *_: next(routed)) for r in routers(self.ours)]
        try:
            return self.ours.head(self.ours(torch.tensor(ids), ForcedView([len(ids)], choices.selected)))
        finally:
            for hook in hooks:
                hook.remove()


def routers(model: Glm5) -> list[nn.Module]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


@contextmanager
def recorded_router_gaps(model: Glm5) -> Iterator[list[float]]:
    gaps: list[float] = []

    def record(gate: nn.Module, args: tuple[Tensor], out: Any) -> None:
        k = gate.cfg.num_experts_per_tok
        choice_TE = (args[0].float() @ gate.weight.float().T).sigmoid() + gate.e_score_correction_bias
        if k < choice_TE.shape[1]:
            best = choice_TE.topk(k + 1, dim=1).values
            gaps.append((best[:, k - 1] - best[:, k]).min().item())

    hooks = [r.register_forward_hook(record) for r in routers(model)]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


class GapView(PackedView):
    """A packed view that notes, per indexer, the smallest gap between the last key taken and the first left out."""

    def __init__(self, lengths: list[int]):
        super().__init__(lengths)
        self.gaps: list[float] = []

    def select(self, layer_idx: int, q_TJI: Tensor, w_TJ: Tensor, top_k: int, scale: float) -> Selection:
        score_TS = index_score(
            q_TJI, self._index_key_PZI, w_TJ, self.page_table_BN, self.row_T, self.end_T, scale=scale
        )
        if score_TS.shape[1] > top_k:
            best = score_TS.topk(top_k + 1, dim=1).values
            gap_T = best[:, top_k - 1] - best[:, top_k]
            self.gaps.append(gap_T[gap_T.isfinite()].min().item())
        return super().select(layer_idx, q_TJI, w_TJ, top_k, scale)


class ForcedView(PackedView):
    """A packed view whose selections were made elsewhere: masks [T, T], one per indexer in layer order."""

    def __init__(self, lengths: list[int], selected: list[Tensor]):
        super().__init__(lengths)
        self._selected = iter(selected)

    def select(self, layer_idx: int, q_TJI: Tensor, w_TJ: Tensor, top_k: int, scale: float) -> Selection:
        mask_TT = next(self._selected)
        positions = torch.arange(mask_TT.shape[1]).expand_as(mask_TT).masked_fill(~mask_TT, mask_TT.shape[1])
        keys_TK = positions.sort(dim=1).values[:, :top_k]
        return Selection(keys_TK.masked_fill(keys_TK == mask_TT.shape[1], -1).int())
