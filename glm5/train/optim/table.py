"""The optimizer of each parameter, and the matrices that it holds, as a table of names.

    Muon     every matrix. A tensor of the checkpoint is one matrix, except three with a matrix per head: q_b_proj (W_UQ
             with its RoPE rows), kv_b_proj (W_UK and W_UV) and the indexer's wq_b. Of stacked experts each is a matrix;
             gate and up, one tensor in the model, are separate.
    AdamW    embedding, lm_head, value head, norms, biases; LoRA's matrices

Names are the model's (experts stacked). The split depends only on rows, so a shard of complete heads or experts is
updated like the full tensor.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.step import OptimizerConfig


class Rule(NamedTuple):
    """`rows`: config fields with the row counts of the matrices that repeat along a tensor's rows; empty if the tensor
    is one matrix. `when_split`: the tensor is one matrix if heads are not split."""

    optimizer: Literal["muon", "adamw"]
    rows: tuple[str, ...] = ()
    when_split: bool = False
    decays: bool = True


MUON = Rule("muon")
QUERY_HEADS = Rule("muon", ("qk_head_dim",), when_split=True)
QUERY_HEADS_APART = Rule("muon", ("qk_nope_head_dim", "qk_rope_head_dim"), when_split=True)
KEY_AND_VALUE_HEADS = Rule("muon", ("qk_nope_head_dim", "v_head_dim"), when_split=True)
INDEX_HEADS = Rule("muon", ("index_head_dim",), when_split=True)
GATE_AND_UP = Rule("muon", ("moe_intermediate_size", "moe_intermediate_size"))
TOKENS = Rule("adamw")
VECTOR = Rule("adamw", decays=False)

# `*` is a number.
TABLE: dict[str, Rule] = {
    "model.embed_tokens.weight": TOKENS,
    "model.norm.weight": VECTOR,
    "lm_head.weight": TOKENS,
    "value_head.weight": TOKENS,
    "model.layers.*.input_layernorm.weight": VECTOR,
    "model.layers.*.post_attention_layernorm.weight": VECTOR,
    "model.layers.*.self_attn.q_a_proj.weight": MUON,
    "model.layers.*.self_attn.q_a_layernorm.weight": VECTOR,
    "model.layers.*.self_attn.q_b_proj.weight": QUERY_HEADS,
    "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": MUON,
    "model.layers.*.self_attn.kv_a_layernorm.weight": VECTOR,
    "model.layers.*.self_attn.kv_b_proj.weight": KEY_AND_VALUE_HEADS,
    "model.layers.*.self_attn.o_proj.weight": MUON,
    "model.layers.*.self_attn.indexer.wq_b.weight": INDEX_HEADS,
    "model.layers.*.self_attn.indexer.wk.weight": MUON,
    "model.layers.*.self_attn.indexer.k_norm.weight": VECTOR,
    "model.layers.*.self_attn.indexer.k_norm.bias": VECTOR,
    "model.layers.*.self_attn.indexer.weights_proj.weight": MUON,
    "model.layers.*.mlp.gate_proj.weight": MUON,
    "model.layers.*.mlp.up_proj.weight": MUON,
    "model.layers.*.mlp.down_proj.weight": MUON,
    "model.layers.*.mlp.gate.weight": MUON,
    "model.layers.*.mlp.experts.gate_up_proj": GATE_AND_UP,
    "model.layers.*.mlp.experts.down_proj": MUON,
    "model.layers.*.mlp.shared_experts.gate_proj.weight": MUON,
    "model.layers.*.mlp.shared_experts.up_proj.weight": MUON,
    "model.layers.*.mlp.shared_experts.down_proj.weight": MUON,
    "model.layers.*.enorm.weight": VECTOR,
    "model.layers.*.hnorm.weight": VECTOR,
    "model.layers.*.eh_proj.weight": MUON,
    "model.layers.*.shared_head.norm.weight": VECTOR,
}
_ADAPTER = re.compile(r"\.lora_[AB]$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def rule_of(name: str, cfg: OptimizerConfig) -> Rule:
    """The rule of the model's parameter `name`. Raises ConfigError for a name that the table lacks."""
    rule = TOKENS if _ADAPTER.search(name) else TABLE.get(_NUMBER.sub("*", name))
    if rule is None:
        raise ConfigError(f"optimizer: no rule for the parameter {name}; freeze it, or add it to train/optim/table.py")
    if rule is QUERY_HEADS and cfg.split_rope:
        rule = QUERY_HEADS_APART
    if rule.when_split and not cfg.split:
        rule = MUON
    if name == "lm_head.weight" and cfg.muon_lm_head:
        rule = MUON
    return rule._replace(optimizer="adamw", rows=()) if cfg.kind == "adamw" else rule


def is_matrix(name: str, cfg: OptimizerConfig) -> bool:
    """Whether Muon trains the parameter, or would with kind = "muon"."""
    return rule_of(name, cfg.model_copy(update={"kind": "muon"})).optimizer == "muon"


def row_sizes(rule: Rule, model: ModelConfig) -> tuple[int, ...]:
    """Row counts of the repeating matrices; () where the tensor is one matrix, or a stack."""
    return tuple(getattr(model, name) for name in rule.rows)


def split_matrices(tensor: Tensor, rows: tuple[int, ...]) -> list[Tensor]:
    """Views [n, r, I] of the matrices in `tensor` [..., O, I], one view for each of `rows`.

    Without rows, its last two dimensions are a matrix. ValueError where O is not a multiple of sum(rows).
    """
    if not rows:
        return [tensor.reshape(-1, *tensor.shape[-2:])]
    if tensor.shape[-2] % sum(rows):
        raise ValueError(f"{list(tensor.shape)} does not hold whole groups of {rows} rows: cut shards at their borders")
    return list(tensor.reshape(-1, sum(rows), tensor.shape[-1]).split(rows, dim=1))


def join_matrices(parts: Iterable[Tensor], shape: torch.Size) -> Tensor:
    """The inverse of `split_matrices`."""
    return torch.cat(list(parts), dim=1).view(shape)
