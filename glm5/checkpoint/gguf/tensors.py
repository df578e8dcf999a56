"""The tensors of a GGUF of this architecture: names by the package's own map, shapes, and types.

    kv_b_proj [H (N + V), C]    attn_k_b [H, C, N], transposed for absorbed attention, and attn_v_b [H, V, C]
    experts.E.up_proj           ffn_up_exps [E, F, D]: a stack, one expert behind the other
    norms, biases, router,      float32: what llama.cpp computes in float32
    indexer's weights_proj

Shapes are torch's; GGUF lists dimensions from the innermost out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from glm5.checkpoint.gguf.blocks import TYPES
from glm5.checkpoint.names import STACK, name_of, place_of
from glm5.common.errors import CheckpointError
from glm5.common.extras import require
from glm5.config.model import ModelConfig
from glm5.config.tensors import tensor_specs
from glm5.quant.record import Scheme

_ARCHITECTURE = "GLM_DSA"  # of the package's MODEL_ARCH
KV_B = "kv_b_proj.weight"
_HALVES = ("kv_b_proj.k_b", "kv_b_proj.v_b")
"""What kv_b_proj.weight becomes on its way to a GGUF."""
_FLOAT32 = ("mlp.gate.weight", "indexer.weights_proj.weight")
FLOATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file. `sources`: what lies in it, one behind the other: tensors of a checkpoint by name, or
    half of one. `origin`: the first of these tensors."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    origin: str


def plain_type(name: str, dtype: torch.dtype, num_dims: int) -> str:
    """The type of a tensor that is not quantized. Raises CheckpointError for one that GGUF's readers do not compute
    with."""
    if dtype not in FLOATS:
        raise CheckpointError(
            f"{name} is {dtype}; GGUF takes {', '.join(map(str, FLOATS))}: glm5 convert MODEL OUT --dtype float32"
        )
    return "F32" if num_dims == 1 or name.endswith(_FLOAT32) else FLOATS[dtype]


def split_kv_b(cfg: ModelConfig, name: str, weight: Tensor) -> dict[str, Tensor]:
    """kv_b_proj.weight [H (N + V), C] as k_b [H, C, N] and v_b [H, V, C]."""
    k_HNC, v_HVC = weight.unflatten(0, (cfg.num_attention_heads, -1)).split([cfg.qk_nope_head_dim, cfg.v_head_dim], 1)
    return dict(zip(halves(name), (k_HNC.transpose(1, 2).contiguous(), v_HVC.contiguous()), strict=True))


def join_kv_b(name: str, fetch: Callable[[str], Tensor]) -> Tensor:
    """The inverse of `split_kv_b`; `fetch` has both halves by name."""
    k_HCN, v_HVC = map(fetch, halves(name))
    return torch.cat([k_HCN.transpose(1, 2), v_HVC], 1).flatten(0, 1)


def halves(name: str) -> list[str]:
    """The names of both halves of a kv_b_proj.weight."""
    return [name.replace(KV_B, half) for half in _HALVES]


def types_of(
    tensors: Iterable[GgufTensor],
    dtype_of: Callable[[str], torch.dtype],
    schemes: Mapping[int, Mapping[str, Scheme]],
) -> dict[str, str]:
    """GGUF's types by the file's names. `dtype_of`: of a tensor on disk that is not quantized."""
    found: dict[str, str] = {}
    for tensor in tensors:
        place = place_of(tensor.origin)
        scheme = schemes.get(place.layer_idx, {}).get(place.name.removesuffix(".weight"))
        if scheme is None:
            found[tensor.name] = plain_type(tensor.origin, dtype_of(tensor.origin), len(tensor.shape))
        else:
            found[tensor.name] = TYPES[scheme.weight.bits]
    return found


def gguf_tensors(cfg: ModelConfig) -> list[GgufTensor]:
    """All tensors of the file in their order."""
    found: list[GgufTensor] = []
    for spec in tensor_specs(cfg):
        place, shapes = place_of(spec.name), {spec.name: spec.shape}
        if place.expert:
            continue  # in the stack that expert 0 begins
        if spec.name.endswith(KV_B):
            heads, latent = cfg.num_attention_heads, cfg.kv_lora_rank
            each = (heads, latent, cfg.qk_nope_head_dim), (heads, cfg.v_head_dim, latent)
            shapes = dict(zip(halves(spec.name), each, strict=True))
        for source, shape in shapes.items():
            sources = (source,)
            if place.expert is not None:
                experts = range(cfg.n_routed_experts)
                sources = tuple(name_of(place.layer_idx, place.name, expert) for expert in experts)
                shape = (len(experts), *shape)
            found.append(GgufTensor(gguf_name(cfg, source), shape, sources, spec.name))
    return found


def gguf_name(cfg: ModelConfig, source: str) -> str:
    """The name in the file, by the package's map for GLM_DSA. Raises CheckpointError for what it has no name for."""
    place = place_of(source)
    name = name_of(place.layer_idx, place.name.replace(STACK, "mlp.experts."))
    for half in _HALVES:
        name = name.replace(half, f"{half.rpartition('.')[2]}_proj.weight")
    # llama.cpp's converter spells the router's bias so before it looks it up.
    name = name.replace("gate.e_score_correction_bias", "e_score_correction.bias")
    found = _name_map(cfg.num_layers_with_mtp).get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise CheckpointError(f"{source}: GGUF has no name for it (package gguf, {_ARCHITECTURE})")
    return found


def architecture() -> str:
    """The architecture's name in GGUF. Raises MissingExtra without the package."""
    gguf = require("gguf", "gguf")
    return gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[_ARCHITECTURE]]


@cache
def _name_map(num_layers: int):
    gguf = require("gguf", "gguf")
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[_ARCHITECTURE], num_layers)
