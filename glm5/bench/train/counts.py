"""Operations of a training step for MFU. Recomputation is not counted.

MFU = (6 N_active T + 3 attention forward) / seconds / peak
"""

from glm5.config.model import ModelConfig

PEAK = 989e12
"""Operations a second of an H200 in bfloat16, by its datasheet."""


def layer_active(cfg: ModelConfig, *, indexer: bool) -> int:
    """Active parameters per token of an MoE layer."""
    heads, width = cfg.num_attention_heads, cfg.hidden_size
    attention = width * cfg.q_lora_rank + cfg.q_lora_rank * heads * cfg.qk_head_dim
    attention += width * (cfg.kv_lora_rank + cfg.qk_rope_head_dim)
    attention += cfg.kv_lora_rank * heads * (cfg.qk_nope_head_dim + cfg.v_head_dim) + heads * cfg.v_head_dim * width
    index = cfg.q_lora_rank * cfg.index_n_heads * cfg.index_head_dim + width * (cfg.index_head_dim + cfg.index_n_heads)
    experts = 3 * width * cfg.moe_intermediate_size * (cfg.num_experts_per_tok + cfg.n_shared_experts)
    return attention + experts + width * cfg.n_routed_experts + indexer * index


def dense_attention(cfg: ModelConfig, num_tokens: int) -> float:
    """FLOPs of the forward pass of one causal sequence, with expanded keys and values."""
    pairs = num_tokens * (num_tokens + 1) / 2
    return 2 * cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim) * pairs


def sparse_attention(cfg: ModelConfig, num_tokens: int) -> float:
    """FLOPs of the forward pass with absorbed weights, over selected keys."""
    width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    return 2 * cfg.num_attention_heads * (width + cfg.kv_lora_rank) * selected_pairs(cfg, num_tokens)


def index_scores(cfg: ModelConfig, num_tokens: int) -> float:
    """FLOPs of the forward pass of the indexer, over all keys."""
    return 2 * cfg.index_n_heads * cfg.index_head_dim * num_tokens * (num_tokens + 1) / 2


def selected_pairs(cfg: ModelConfig, num_tokens: int) -> float:
    short_len = min(num_tokens, cfg.index_topk)
    return short_len * (short_len + 1) / 2 + (num_tokens - short_len) * cfg.index_topk
