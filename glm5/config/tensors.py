"""Every tensor of a BF16 checkpoint, and parameter counts, from one table.

`tensor_specs` lists the tensors one by one, as they lie on disk (one per expert). `count_parameters`
multiplies the same rows by how often they occur, so it costs nothing even for the largest model.
Names and shapes: the published checkpoints; the counts equal theirs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product
from math import ceil, prod
from typing import Literal, NamedTuple

from glm5.config.model import ModelConfig
from glm5.config.resolve import FP8_BLOCK

Dtype = Literal["bf16", "f32"]
Part = Literal[
    "embedding",
    "attention",
    "indexer",
    "dense mlp",
    "experts",
    "shared experts",
    "router",
    "norms",
    "mtp",
    "lm_head",
    "value_head",
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor on disk. `fp8`: in an FP8 checkpoint it is float8_e4m3 with a float32 `<name>_scale_inv`."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    part: Part
    fp8: bool


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. Selection biases of routers are counted separately, as they are not trained by
    gradients."""

    total: int
    """Without the MTP layer."""
    with_mtp: int
    active: int
    """Used for one token, without MTP, embedding table and lm_head (as the published 40B of GLM-5 counts)."""
    biases: int
    """e_score_correction_bias, of all routers, the MTP layer's included; float32."""
    by_part: dict[str, int]
    """Sums to with_mtp; everything in the MTP layer is "mtp"."""


class _Row(NamedTuple):
    """A tensor, or one for each of `copies` experts ({e} in the name), of which a token uses `used`."""

    name: str
    shape: tuple[int, ...]
    part: Part
    fp8: bool = False
    dtype: Dtype = "bf16"
    copies: int = 1
    used: int = 1


def tensor_specs(cfg: ModelConfig, mtp: bool = True) -> list[TensorSpec]:
    """All tensors in the order of the model, `mtp` with those of the MTP layer (if the model has one)."""
    embedding, *tail = _global_rows(cfg)
    specs = list(_expand("", [embedding]))
    for layer_idx in range(cfg.num_layers_with_mtp if mtp else cfg.num_hidden_layers):
        is_mtp = layer_idx == cfg.num_hidden_layers
        rows = _layer_rows(cfg, cfg.has_indexer(layer_idx), cfg.is_moe(layer_idx), is_mtp)
        specs += _expand(f"model.layers.{layer_idx}.", rows)
    return [*specs, *_expand("", tail)]


def count_parameters(cfg: ModelConfig) -> ParameterCount:
    """The numbers behind `tensor_specs(cfg)`, without listing the tensors."""
    by_part: Counter[str] = Counter()
    active = biases = 0
    for row, times in _counted_rows(cfg):
        size = prod(row.shape) * times
        if row.dtype == "f32":
            biases += size * row.copies
            continue
        by_part[row.part] += size * row.copies
        if row.part not in ("mtp", "embedding", "lm_head", "value_head"):
            active += size * row.used
    with_mtp = by_part.total()
    return ParameterCount(with_mtp - by_part["mtp"], with_mtp, active, biases, dict(by_part))


def count_bytes(cfg: ModelConfig, fp8: bool) -> Counter[tuple[str, Part]]:
    """Bytes on disk by (safetensors dtype, part) of a BF16 checkpoint, or of an FP8 one, block scales included."""
    num_bytes: Counter[tuple[str, Part]] = Counter()
    for row, times in _counted_rows(cfg):
        size, copies = prod(row.shape), row.copies * times
        if fp8 and row.fp8:
            num_blocks = prod(ceil(dim / FP8_BLOCK) for dim in row.shape)
            num_bytes["F8_E4M3", row.part] += copies * size
            num_bytes["F32", row.part] += copies * 4 * num_blocks
        else:
            num_bytes[row.dtype.upper(), row.part] += copies * size * (4 if row.dtype == "f32" else 2)
    return num_bytes


def _counted_rows(cfg: ModelConfig) -> list[tuple[_Row, int]]:
    """Every kind of tensor with the number of layers that have it."""
    kinds = Counter(
        (cfg.has_indexer(i), cfg.is_moe(i), i == cfg.num_hidden_layers) for i in range(cfg.num_layers_with_mtp)
    )
    rows = [(row, 1) for row in _global_rows(cfg)]
    return rows + [(row, times) for kind, times in kinds.items() for row in _layer_rows(cfg, *kind)]


def _expand(prefix: str, rows: list[_Row]) -> Iterator[TensorSpec]:
    for copies, group in groupby(rows, key=lambda row: row.copies):
        for e, row in product(range(copies), list(group)):
            yield TensorSpec(prefix + row.name.format(e=e), row.shape, row.dtype, row.part, row.fp8)


def _global_rows(cfg: ModelConfig) -> list[_Row]:
    table = (cfg.vocab_size, cfg.hidden_size)
    rows = [
        _Row("model.embed_tokens.weight", table, "embedding"),
        _Row("model.norm.weight", (cfg.hidden_size,), "norms"),
        _Row("lm_head.weight", table, "lm_head"),
    ]
    return [*rows, _Row("value_head.weight", (1, cfg.hidden_size), "value_head")] if cfg.value_head else rows


def _layer_rows(cfg: ModelConfig, has_indexer: bool, is_moe: bool, is_mtp: bool) -> list[_Row]:
    hidden = cfg.hidden_size
    rows = [_Row("input_layernorm.weight", (hidden,), "norms"), *_attention_rows(cfg)]
    if has_indexer:
        rows += _indexer_rows(cfg)
    rows.append(_Row("post_attention_layernorm.weight", (hidden,), "norms"))
    rows += _moe_rows(cfg) if is_moe else _mlp_rows("mlp.", "dense mlp", hidden, cfg.intermediate_size)
    if is_mtp:
        rows += [
            _Row("enorm.weight", (hidden,), "mtp"),
            _Row("hnorm.weight", (hidden,), "mtp"),
            _Row("eh_proj.weight", (hidden, 2 * hidden), "mtp"),
            _Row("shared_head.norm.weight", (hidden,), "mtp"),
        ]
        rows = [row._replace(part="mtp") for row in rows]
    return rows


def _attention_rows(cfg: ModelConfig) -> list[_Row]:
    hidden, heads = cfg.hidden_size, cfg.num_attention_heads
    kv_head = cfg.qk_nope_head_dim + cfg.v_head_dim
    return [
        _Row("self_attn.q_a_proj.weight", (cfg.q_lora_rank, hidden), "attention", fp8=True),
        _Row("self_attn.q_a_layernorm.weight", (cfg.q_lora_rank,), "norms"),
        _Row("self_attn.q_b_proj.weight", (heads * cfg.qk_head_dim, cfg.q_lora_rank), "attention", fp8=True),
        _Row(
            "self_attn.kv_a_proj_with_mqa.weight",
            (cfg.kv_lora_rank + cfg.qk_rope_head_dim, hidden),
            "attention",
            fp8=True,
        ),
        _Row("self_attn.kv_a_layernorm.weight", (cfg.kv_lora_rank,), "norms"),
        _Row("self_attn.kv_b_proj.weight", (heads * kv_head, cfg.kv_lora_rank), "attention", fp8=True),
        _Row("self_attn.o_proj.weight", (hidden, heads * cfg.v_head_dim), "attention", fp8=True),
    ]


def _indexer_rows(cfg: ModelConfig) -> list[_Row]:
    heads, head_dim = cfg.index_n_heads, cfg.index_head_dim
    return [
        _Row("self_attn.indexer.wq_b.weight", (heads * head_dim, cfg.q_lora_rank), "indexer", fp8=True),
        _Row("self_attn.indexer.wk.weight", (head_dim, cfg.hidden_size), "indexer", fp8=True),
        _Row("self_attn.indexer.k_norm.weight", (head_dim,), "indexer"),
        _Row("self_attn.indexer.k_norm.bias", (head_dim,), "indexer"),
        _Row("self_attn.indexer.weights_proj.weight", (heads, cfg.hidden_size), "indexer"),
    ]


def _moe_rows(cfg: ModelConfig) -> list[_Row]:
    hidden, experts = cfg.hidden_size, cfg.n_routed_experts
    each = _mlp_rows("mlp.experts.{e}.", "experts", hidden, cfg.moe_intermediate_size)
    shared_width = cfg.moe_intermediate_size * cfg.n_shared_experts
    return [
        _Row("mlp.gate.weight", (experts, hidden), "router"),
        _Row("mlp.gate.e_score_correction_bias", (experts,), "router", dtype="f32"),
        *(row._replace(copies=experts, used=cfg.num_experts_per_tok) for row in each),
        *_mlp_rows("mlp.shared_experts.", "shared experts", hidden, shared_width),
    ]


def _mlp_rows(prefix: str, part: Part, hidden: int, width: int) -> list[_Row]:
    return [
        _Row(f"{prefix}gate_proj.weight", (width, hidden), part, fp8=True),
        _Row(f"{prefix}up_proj.weight", (width, hidden), part, fp8=True),
        _Row(f"{prefix}down_proj.weight", (hidden, width), part, fp8=True),
    ]
