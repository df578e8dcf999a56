"""A config as GGUF's keys, as llama.cpp's converter writes them for this architecture.

MLA is one head of keys there, the latent [C + R], with the sizes of the expanded heads beside it (`*_mla`).
"""

from collections.abc import Iterable
from typing import Any

from glm5.common.errors import ConfigError
from glm5.common.extras import require
from glm5.config.model import ModelConfig


def check_config(cfg: ModelConfig) -> None:
    """Raise ConfigError for what this architecture has and GGUF's keys or llama.cpp do not."""
    dense = cfg.first_k_dense_replace
    if any(kind == "dense" for kind in cfg.mlp_layer_types[dense:]):
        raise ConfigError(
            f"mlp_layer_types: has a dense layer behind layer {dense}, the first with experts; GGUF holds only the "
            "number of leading dense layers; allowed: dense layers at the beginning"
        )
    if cfg.value_head:
        raise ConfigError("value_head: GGUF has no tensor for it; allowed: a checkpoint without a value head")


def add_config(writer: Any, cfg: ModelConfig) -> None:
    """Add the architecture's keys to a GGUFWriter."""
    gguf = require("gguf", "gguf")
    latent, rope = cfg.kv_lora_rank, cfg.qk_rope_head_dim
    values = {
        "block_count": cfg.num_layers_with_mtp,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "vocab_size": cfg.vocab_size,
        "feed_forward_length": cfg.intermediate_size,
        "leading_dense_block_count": cfg.first_k_dense_replace,
        "head_count": cfg.num_attention_heads,
        "head_count_kv": 1,
        "q_lora_rank": cfg.q_lora_rank,
        "kv_lora_rank": latent,
        "key_length": latent + rope,
        "value_length": latent,
        "key_length_mla": cfg.qk_head_dim,
        "value_length_mla": cfg.v_head_dim,
        "rope_dimension_count": rope,
        "rope_freq_base": cfg.rope_theta,
        "layer_norm_rms_eps": cfg.rms_norm_eps,
        "expert_count": cfg.n_routed_experts,
        "expert_used_count": cfg.num_experts_per_tok,
        "expert_shared_count": cfg.n_shared_experts,
        "expert_feed_forward_length": cfg.moe_intermediate_size,
        "expert_group_count": cfg.n_group,
        "expert_group_used_count": cfg.topk_group,
        "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
        "expert_weights_scale": cfg.routed_scaling_factor,
        "expert_weights_norm": cfg.norm_topk_prob,
        "nextn_predict_layers": cfg.num_nextn_predict_layers,
        "indexer_head_count": cfg.index_n_heads,
        "indexer_key_length": cfg.index_head_dim,
        "indexer_top_k": cfg.index_topk,
    }
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    # llama.cpp reads this key; the package's newest release does not name it yet.
    writer.add_array(f"{writer.arch}.attention.indexer.types", [kind == "full" for kind in cfg.indexer_types])


def add_general(writer: Any, name: str, types: Iterable[str]) -> None:
    """Add what GGUF says of every model; `writer` knows the tensors already, whose types are `types`."""
    gguf = require("gguf", "gguf")
    kind = next((each for each in ("Q4_0", "Q8_0", "BF16", "F16") if each in set(types)), None)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_size_label(gguf.size_label(*writer.get_total_parameter_count()))
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind else "ALL_F32"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
