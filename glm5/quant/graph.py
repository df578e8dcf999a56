"""The tensors of GLM-5 that have to change together when weights are rotated or smoothed, as tables.

Names are the checkpoint's, without `model.layers.N.` and `.weight`; `experts.*` is every routed expert, alone or
stacked [E, O, I]. Tensors that a layer does not have (a shared indexer, experts of a dense layer) are skipped.
Sources: the forward pass (model/), msModelSlim `model/glm_5/quarot.py` and `model_adapter.py`.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

Side = Literal["inputs", "outputs"]
RotationName = Literal["residual", "q latent", "kv latent", "value heads"]
SubgraphKind = Literal["norm-linear", "ov", "up-down"]

Part = Literal["all", "latent", "values", "heads", "halves", "first half", "second half"]
"""A part of a matrix's inputs or outputs: "latent" the first kv_lora_rank outputs; "values" the last v_head_dim outputs
of each head; "heads" the v_head_dim inputs of each head; "halves" each half of the inputs."""

_READS_RESIDUAL = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
_INDEXER_READS_RESIDUAL = ("self_attn.indexer.wk", "self_attn.indexer.weights_proj")
_READS_Q_LATENT = ("self_attn.q_b_proj", "self_attn.indexer.wq_b")
_MLPS = ("mlp", "mlp.experts.*", "mlp.shared_experts")
_GATE_AND_UP = tuple(f"{mlp}.{name}" for mlp in _MLPS for name in ("gate_proj", "up_proj"))
_MLP_READS = (*_GATE_AND_UP, "mlp.gate")


class Fold(NamedTuple):
    """A norm whose weight can be folded into the inputs of the matrices `into`; it is 1 afterwards."""

    norm: str
    into: tuple[str, ...]
    part: Part = "all"


class Rotated(NamedTuple):
    """A side of a matrix that a rotation changes."""

    tensor: str
    side: Side
    part: Part = "all"


class RotationFacts(NamedTuple):
    """A rotation: the config field of its size, the norms to fold before it, and all sides that it rotates."""

    size: str
    folds: tuple[Fold, ...]
    sides: tuple[Rotated, ...]


@dataclass(frozen=True)
class Subgraph:
    """`targets` read the output channels of `source`, so a channel can be divided in the source and multiplied in them.

    The source is a norm (norm-linear), the rows of up (up-down), or the value rows of kv_b, by head (ov).
    """

    kind: SubgraphKind
    source: str
    targets: tuple[str, ...]


ROTATIONS: dict[RotationName, RotationFacts] = {
    "residual": RotationFacts(
        "hidden_size",
        (
            Fold("input_layernorm", (*_READS_RESIDUAL, *_INDEXER_READS_RESIDUAL)),
            Fold("post_attention_layernorm", _MLP_READS),
            Fold("enorm", ("eh_proj",), "first half"),
            Fold("hnorm", ("eh_proj",), "second half"),
            Fold("model.norm", ("lm_head",)),
            Fold("shared_head.norm", ("shared_head.head",)),
        ),
        (
            Rotated("model.embed_tokens", "inputs"),
            *(Rotated(name, "inputs") for name in (*_READS_RESIDUAL, *_INDEXER_READS_RESIDUAL, *_MLP_READS)),
            Rotated("lm_head", "inputs"),
            Rotated("shared_head.head", "inputs"),
            Rotated("eh_proj", "inputs", "halves"),
            Rotated("eh_proj", "outputs"),
            Rotated("self_attn.o_proj", "outputs"),
            *(Rotated(f"{mlp}.down_proj", "outputs") for mlp in _MLPS),
        ),
    ),
    "q latent": RotationFacts(
        "q_lora_rank",
        (Fold("self_attn.q_a_layernorm", _READS_Q_LATENT),),
        (Rotated("self_attn.q_a_proj", "outputs"), *(Rotated(name, "inputs") for name in _READS_Q_LATENT)),
    ),
    "kv latent": RotationFacts(
        "kv_lora_rank",
        (Fold("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),),
        (Rotated("self_attn.kv_a_proj_with_mqa", "outputs", "latent"), Rotated("self_attn.kv_b_proj", "inputs")),
    ),
    "value heads": RotationFacts(
        "v_head_dim",
        (),
        (Rotated("self_attn.kv_b_proj", "outputs", "values"), Rotated("self_attn.o_proj", "inputs", "heads")),
    ),
}

SUBGRAPHS: tuple[Subgraph, ...] = (
    *(Subgraph("up-down", f"{mlp}.up_proj", (f"{mlp}.down_proj",)) for mlp in _MLPS),
    Subgraph("ov", "self_attn.kv_b_proj", ("self_attn.o_proj",)),
    Subgraph("norm-linear", "self_attn.q_a_layernorm", _READS_Q_LATENT),
    Subgraph("norm-linear", "input_layernorm", (*_READS_RESIDUAL, *_INDEXER_READS_RESIDUAL)),
    Subgraph("norm-linear", "post_attention_layernorm", _MLP_READS),
)
"""In the order in which they are smoothed. msModelSlim's recipe excludes post_attention_layernorm, because the router
reads it too. Here the router is a target like the others, so its choices do not change."""

_LAYER = re.compile(r"(model\.layers\.\d+\.)?(.*?)(\.weight)?$")
_EXPERT = re.compile(r"\bexperts\.\d+\.")


def place(name: str) -> tuple[str, str]:
    """A tensor's layer prefix ("model.layers.3." or "") and its name in the tables above."""
    match = _LAYER.fullmatch(name)
    assert match is not None, f"{name=}"
    return match[1] or "", _EXPERT.sub("experts.*.", match[2])
