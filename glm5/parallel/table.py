"""Placement of every tensor of a checkpoint under tensor parallelism, by name.

    heads        rows of q_b_proj and kv_b_proj, columns of o_proj, by attention head
    units        rows of gate_proj and up_proj, columns of down_proj: units of an MLP or of each expert (an F slice)
    vocabulary   rows of the embedding and of lm_head: token ids
    replicated   everything else: norms, low-rank and index projections, routers
    experts      expert parallelism in training: each rank has some routed experts (train/parallel/row_layout.py)

A rank's columns of o_proj and down_proj give a partial sum, which a collective completes (`apply.py`). Block scales of
FP8 weights are sharded with their blocks of 128.
"""

import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig

_BLOCK = 128
SCALE_SUFFIX = "_scale_inv"


class Placement(NamedTuple):
    """How a tensor is sharded: dimension (None: replicated), and the config field whose count is divided. With
    `expert_parallel`, training may instead give each rank complete experts."""

    kind: Literal["column", "row", "expert F slice", "vocabulary", "replicated"]
    dim: int | None = None
    counted: str | None = None
    expert_parallel: bool = False


REPLICATED = Placement("replicated")
VOCABULARY = Placement("vocabulary", 0, "vocab_size")
HEAD_ROWS = Placement("column", 0, "num_attention_heads")
HEAD_COLUMNS = Placement("row", 1, "num_attention_heads")
UNIT_ROWS = Placement("column", 0, "intermediate_size")
UNIT_COLUMNS = Placement("row", 1, "intermediate_size")
EXPERT_ROWS = Placement("expert F slice", 0, "moe_intermediate_size")
EXPERT_COLUMNS = Placement("expert F slice", 1, "moe_intermediate_size")
ROUTED_ROWS, ROUTED_COLUMNS = EXPERT_ROWS._replace(expert_parallel=True), EXPERT_COLUMNS._replace(expert_parallel=True)

# Names on disk; `*` is a number.
TABLE: dict[str, Placement] = {
    "model.embed_tokens.weight": VOCABULARY,
    "model.norm.weight": REPLICATED,
    "lm_head.weight": VOCABULARY,
    "value_head.weight": REPLICATED,
    "model.layers.*.input_layernorm.weight": REPLICATED,
    "model.layers.*.post_attention_layernorm.weight": REPLICATED,
    "model.layers.*.self_attn.q_a_proj.weight": REPLICATED,
    "model.layers.*.self_attn.q_a_layernorm.weight": REPLICATED,
    "model.layers.*.self_attn.q_b_proj.weight": HEAD_ROWS,
    "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": REPLICATED,
    "model.layers.*.self_attn.kv_a_layernorm.weight": REPLICATED,
    "model.layers.*.self_attn.kv_b_proj.weight": HEAD_ROWS,
    "model.layers.*.self_attn.o_proj.weight": HEAD_COLUMNS,
    "model.layers.*.self_attn.indexer.wq_b.weight": REPLICATED,
    "model.layers.*.self_attn.indexer.wk.weight": REPLICATED,
    "model.layers.*.self_attn.indexer.k_norm.weight": REPLICATED,
    "model.layers.*.self_attn.indexer.k_norm.bias": REPLICATED,
    "model.layers.*.self_attn.indexer.weights_proj.weight": REPLICATED,
    "model.layers.*.mlp.gate_proj.weight": UNIT_ROWS,
    "model.layers.*.mlp.up_proj.weight": UNIT_ROWS,
    "model.layers.*.mlp.down_proj.weight": UNIT_COLUMNS,
    "model.layers.*.mlp.gate.weight": REPLICATED,
    "model.layers.*.mlp.gate.e_score_correction_bias": REPLICATED,
    "model.layers.*.mlp.experts.*.gate_proj.weight": ROUTED_ROWS,
    "model.layers.*.mlp.experts.*.up_proj.weight": ROUTED_ROWS,
    "model.layers.*.mlp.experts.*.down_proj.weight": ROUTED_COLUMNS,
    "model.layers.*.mlp.shared_experts.gate_proj.weight": EXPERT_ROWS,
    "model.layers.*.mlp.shared_experts.up_proj.weight": EXPERT_ROWS,
    "model.layers.*.mlp.shared_experts.down_proj.weight": EXPERT_COLUMNS,
    "model.layers.*.enorm.weight": REPLICATED,
    "model.layers.*.hnorm.weight": REPLICATED,
    "model.layers.*.eh_proj.weight": REPLICATED,
    "model.layers.*.shared_head.norm.weight": REPLICATED,
    "model.layers.*.hidden_rotation.weight": REPLICATED,
    "model.layers.*.chained_rotation.weight": REPLICATED,
}
_COUNTED = tuple(dict.fromkeys(one.counted for one in TABLE.values() if one.counted is not None))
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Shard(NamedTuple):
    """One of `size` ranks that share a model."""

    rank: int = 0
    size: int = 1


UNSHARDED = Shard()


class Span(NamedTuple):
    """A rank's slice of a tensor: `start` to `stop` of dimension `dim`."""

    dim: int
    start: int
    stop: int


def placement_of(name: str) -> Placement:
    """The placement of the tensor `name` on disk, or of its block scales. Raises KeyError for an unknown name."""
    return TABLE[_NUMBER.sub("*", name.removesuffix(SCALE_SUFFIX))]


def span_of(name: str, shape: tuple[int, ...], shard: Shard) -> Span | None:
    """The slice of `shard` of the weight `name` with the unsharded `shape`; None: all of it."""
    dim = placement_of(name).dim
    if dim is None or shard.size == 1:
        return None
    part, rest = divmod(shape[dim], shard.size)
    assert not rest, f"{name=} {shape=} {shard=}"  # see check_divides
    return Span(dim, shard.rank * part, (shard.rank + 1) * part)


def scale_span(span: Span) -> Span:
    """The scales of a weight's span."""
    return Span(span.dim, span.start // _BLOCK, -(-span.stop // _BLOCK))


def local_config(cfg: ModelConfig, size: int) -> ModelConfig:
    """The config of one rank's modules, with sharded sizes divided.

    Raises ConfigError when heads, widths or vocabulary cannot be sharded evenly.
    """
    if size == 1:
        return cfg
    counts = {name: getattr(cfg, name) for name in _COUNTED}
    if wrong := {name: count for name, count in counts.items() if count % size}:
        got = ", ".join(f"{name} {count}" for name, count in wrong.items())
        raise _refused(size, f"does not divide this model's {got}", _sizes(counts))
    return cfg.model_copy(update={name: count // size for name, count in counts.items()})


def check_blocks(cfg: ModelConfig, shapes: Iterable[tuple[str, tuple[int, ...]]], size: int) -> None:
    """Check the names and shapes of FP8 weights. Raises ConfigError if a rank's slice would begin or end inside a scale
    block of 128, unless the slice is within one block."""
    wrong: dict[str, int] = {}
    for name, shape in {(_NUMBER.sub("*", name), shape) for name, shape in shapes}:
        for rank in range(size):
            span = span_of(name, shape, Shard(rank, size))
            if span is not None and not _fits_blocks(span):
                wrong[name] = span.stop - span.start
    if wrong:
        name, width = min(wrong.items())
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        counts = {name: getattr(cfg, name) for name in _COUNTED}
        smaller = [one for one in _sizes(counts) if one < size]
        raise _refused(
            size, f"cuts {name}{more} of this FP8 checkpoint into {width}, which is no multiple of {_BLOCK}", smaller
        )


def _fits_blocks(span: Span) -> bool:
    """Whether the slice consists of complete blocks or is within one."""
    within = span.start // _BLOCK == (span.stop - 1) // _BLOCK
    return within or (span.start % _BLOCK == 0 and (span.stop % _BLOCK == 0))


def _sizes(counts: dict[str, Any]) -> list[int]:
    return [size for size in range(1, min(counts.values()) + 1) if not any(count % size for count in counts.values())]


def _refused(size: int, why: str, allowed: list[int]) -> ConfigError:
    return ConfigError(f"tensor_parallel_size: got {size}, which {why}; allowed here: {', '.join(map(str, allowed))}")
