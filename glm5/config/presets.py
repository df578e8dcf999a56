"""Architectures known by name; every size of the demo and the test model is written here and nowhere else.

    glm-5     zai-org/GLM-5 and GLM-5.1         glm-5.2   zai-org/GLM-5.2 and GLM-5.3
    nano      the demo's model                  tiny      the tests' model

`nano` and `tiny` have 16 indexer heads: with fewer, whole rows of scores are exactly 0 and tie. `nano`'s
hidden and expert widths are multiples of 128 and its low ranks and value width powers of two, so that every
quantization scheme fits.
"""

from typing import Any, Literal, get_args

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.resolve import ARCHITECTURE, MODEL_TYPE

_COMMON: dict[str, Any] = {
    "model_type": MODEL_TYPE,
    "architectures": [ARCHITECTURE],
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}

_GLM_5: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "max_position_embeddings": 202752,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}

_GLM_5_2: dict[str, Any] = {
    **_GLM_5,
    "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
    "max_position_embeddings": 1048576,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
}

_NANO: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 768,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "index_topk": 32,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk_pattern": "FFS",
    "index_share_for_mtp_iteration": True,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "max_position_embeddings": 4096,
}

_TINY: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk_pattern": "FFSF",
    "index_share_for_mtp_iteration": True,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "max_position_embeddings": 1024,
}

PresetName = Literal["glm-5", "glm-5.2", "nano", "tiny"]
PRESET_NAMES: tuple[str, ...] = get_args(PresetName)
_PRESETS = dict(zip(PRESET_NAMES, (_GLM_5, _GLM_5_2, _NANO, _TINY), strict=True))


def preset(name: str, num_hidden_layers: int | None = None) -> ModelConfig:
    """The architecture of that name (see the module docstring for the four), or its first so many layers."""
    if name not in _PRESETS:
        raise ConfigError(f"preset: got {name!r}; allowed: {', '.join(PRESET_NAMES)}")
    cfg = ModelConfig.from_dict(_PRESETS[name])
    if num_hidden_layers is None:
        return cfg
    if not 1 <= num_hidden_layers <= cfg.num_hidden_layers:
        raise ConfigError(f"num_hidden_layers: got {num_hidden_layers}; allowed: 1 to {cfg.num_hidden_layers}")
    return cfg.replace(
        num_hidden_layers=num_hidden_layers,
        mlp_layer_types=list(cfg.mlp_layer_types[:num_hidden_layers]),
        indexer_types=list(cfg.indexer_types[:num_hidden_layers]),
    )
