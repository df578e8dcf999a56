"""From a raw config.json to ModelConfig's fields: per-layer types, rotary base, renamed and fixed keys.

    indexer_types:   indexer_types, else index_topk_pattern, else full iff max(i - offset + 1, 0) % freq == 0
    mlp_layer_types: mlp_layer_types, else the first first_k_dense_replace layers dense
    rope_theta:      rope_parameters.rope_theta, else a legacy top-level rope_theta; never a default

Sources: transformers' GlmMoeDsaConfig for the orders, the published GLM-5, 5.1, 5.2 and 5.3 files for the keys.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.common.errors import ConfigError
from glm5.config.refusal import refuse

logger = logging.getLogger(__name__)

MODEL_TYPE = "glm_moe_dsa"
ARCHITECTURE = "GlmMoeDsaForCausalLM"

# Keys whose other values mean other numbers. The first value is the one written back; a key that is absent is fine.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (True,),
    "moe_router_dtype": ("float32", "fp32", None),
    "rope_scaling": (None,),
}
NOT_WRITTEN = ("mlp_bias", "rope_scaling")
# Known, and without any effect on this architecture: kept for saving, not listed as unknown.
UNUSED = ("use_cache", "pretraining_tp", "ep_size", "transformers_version", "output_router_logits")
# Follow from other keys, so they are checked or dropped when read and computed anew when written.
DERIVED = ("num_key_value_heads", "qk_head_dim", "head_dim", "layer_types", "moe_layer_freq", "num_experts")
LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")
FP8_BLOCK = 128  # one float32 scale for each 128 x 128 of an FP8 weight; the last ones are ragged
DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_architecture(raw: Mapping[str, Any]) -> None:
    """Refuse another architecture by name before anything else is looked at."""
    if "model_type" not in raw:
        raise ConfigError(f"model_type: missing; allowed: {MODEL_TYPE!r} (GLM-5, 5.1, 5.2, 5.3)")
    if raw["model_type"] != MODEL_TYPE:
        raise refuse("model_type", raw["model_type"], f"{MODEL_TYPE!r} (GLM-5, 5.1, 5.2, 5.3)")
    architectures = raw.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURE]:
        raise refuse("architectures", architectures, f"[{ARCHITECTURE!r}]")


def check_fixed(raw: Mapping[str, Any]) -> None:
    """Refuse values that this architecture does not compute with, rather than ignore them."""
    for key, values in FIXED.items():
        if key in raw and not any(raw[key] == v and isinstance(raw[key], bool) == isinstance(v, bool) for v in values):
            raise refuse(key, raw[key], " or ".join(repr(value) for value in values))
    if raw.get("moe_layer_freq", 1) != 1 and raw.get("mlp_layer_types") is None:
        raise refuse("moe_layer_freq", raw["moe_layer_freq"], "1, or any together with mlp_layer_types")
    kinds = raw.get("layer_types") or ()
    for kind in kinds if isinstance(kinds, list | tuple) else (kinds,):
        if kind not in LAYER_TYPES:
            raise refuse("layer_types", kind, " or ".join(repr(name) for name in LAYER_TYPES))
    quantization = raw.get("quantization_config")
    blocks = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if blocks is not None and blocks != [FP8_BLOCK, FP8_BLOCK]:
        raise refuse("quantization_config.weight_block_size", blocks, f"[{FP8_BLOCK}, {FP8_BLOCK}]")


def check_duplicates(raw: Mapping[str, Any]) -> None:
    """Keys that repeat another one must agree with it."""
    for key, original in (("num_experts", "n_routed_experts"), ("num_key_value_heads", "num_attention_heads")):
        if raw.get(key) is not None and original in raw and raw[key] != raw[original]:
            raise refuse(key, raw[key], f"the value of {original}, {raw[original]!r}")


def indexer_types(raw: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """ "full" or "shared" for each layer, in the resolution order of the module docstring."""
    for key in ("indexer_types", "index_topk_pattern"):
        if raw.get(key) is not None:
            return _spelled_types(key, raw[key], num_layers)
    freq = _at_least_one("index_topk_freq", raw.get("index_topk_freq"), default=1)
    offset = raw.get("index_skip_topk_offset")
    if offset is None:
        offset = 2
    elif type(offset) is not int:
        raise refuse("index_skip_topk_offset", offset, "an integer")
    types = tuple("shared" if max(i - offset + 1, 0) % freq else "full" for i in range(num_layers))
    if types[0] == "shared":
        raise refuse("index_skip_topk_offset", offset, "at least 1, because the first layer has nothing to share")
    return types


def _spelled_types(key: str, given: Any, num_layers: int) -> tuple[str, ...]:
    names = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
    if not isinstance(given, str | Sequence):
        raise refuse(key, given, "a string of F and S or a list of 'full' and 'shared'")
    if len(given) != num_layers:
        raise refuse(key, given, f"{num_layers} entries, one for each layer, not {len(given)}")
    for kind in given:
        if not isinstance(kind, str) or kind not in names:
            raise refuse(key, kind, "'F' or 'full' (own indexer), 'S' or 'shared' (the one before)")
    types = tuple(names[kind] for kind in given)
    if types[0] == "shared":
        raise refuse(key, given, "a first entry 'full', because the first layer has nothing to share")
    return types


def mlp_layer_types(raw: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """ "dense" or "sparse" for each layer; mlp_layer_types wins over first_k_dense_replace, as in transformers."""
    types = raw.get("mlp_layer_types")
    if types is None:
        num_dense = raw.get("first_k_dense_replace")
        if type(num_dense) is not int or num_dense < 0:
            raise refuse("first_k_dense_replace", num_dense, "an integer of at least 0, or the key mlp_layer_types")
        num_dense = min(num_dense, num_layers)
        return ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense)
    if not isinstance(types, list | tuple):
        raise refuse("mlp_layer_types", types, "a list of 'dense' and 'sparse'")
    if len(types) != num_layers:
        raise refuse("mlp_layer_types", types, f"{num_layers} entries, one for each layer, not {len(types)}")
    for kind in types:
        if kind not in ("dense", "sparse"):
            raise refuse("mlp_layer_types", kind, "'dense' or 'sparse'")
    return tuple(types)


def rope_theta(raw: Mapping[str, Any]) -> float:
    """The rotary base. There is no default: GLM-5 has 1e6, GLM-5.2 8e6, and the wrong one is silently wrong."""
    rope = raw.get("rope_parameters")
    if rope is None:
        rope = {}
    elif not isinstance(rope, Mapping):
        raise refuse("rope_parameters", rope, "a mapping with rope_theta and rope_type")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise refuse("rope_parameters.rope_type", kind, "'default' (the GLM-5 family has no rope scaling)")
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise refuse("rope_parameters.partial_rotary_factor", partial, "1.0 (the rotary width is qk_rope_head_dim)")
    key = "rope_parameters.rope_theta" if "rope_theta" in rope else "rope_theta"
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ConfigError("rope_parameters.rope_theta: missing; allowed: a number above 0 (there is no default)")
    if type(theta) not in (int, float) or not 0 < theta <= sys.float_info.max:
        raise refuse(key, theta, "a number above 0")
    if raw.get("rope_theta") not in (None, theta):
        logger.warning("rope_theta %s is not read: rope_parameters.rope_theta is %s", raw["rope_theta"], theta)
    return float(theta)


def dtype_name(raw: Mapping[str, Any]) -> str:
    """The element type that the weights were saved in: key dtype, or torch_dtype in older files."""
    key = "torch_dtype" if "dtype" not in raw and "torch_dtype" in raw else "dtype"
    name = raw.get(key)
    if name is None:
        return "bfloat16"
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPES:
        raise refuse(key, name, " or ".join(DTYPES))
    return name.removeprefix("torch.")


def eos_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end an answer, as a tuple whatever the file's spelling."""
    given = raw.get("eos_token_id")
    ids = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    if any(type(token) is not int or token < 0 for token in ids):
        raise refuse("eos_token_id", given, "a token id or a list of token ids")
    return ids


def _at_least_one(key: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise refuse(key, value, "an integer of at least 1")
    return value
