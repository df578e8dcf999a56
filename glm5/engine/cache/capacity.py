"""The longest context and the number of cache pages.

If memory allows, the cache holds `max_num_seqs` contexts of full length; it must hold at least one.
"""

import torch

from glm5.common import host_memory
from glm5.common.errors import ConfigError
from glm5.config.engine import check_count, check_length
from glm5.config.model import ModelConfig
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache, Layout
from glm5.engine.sampling.parts import MAX_SEARCHED, SEARCH_BYTES

_SCORES_BYTES = 1 << 29  # of the indexer for a part of a prompt, with the workspace of top-k
_PROMPT_LOGITS = 256  # rows
_GRAPH_BYTES = 13 << 20  # for each layer, in all CUDA graphs together
# Share of the free memory of a machine without a GPU; the rest is left to other programs.
_CPU_SHARE = 0.5


def free_bytes(device: torch.device, utilization: float) -> int:
    """Bytes on `device` that a cache may take now. `utilization`: share of a GPU's total memory that may be in use."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * utilization) - (total - free))
    return int(host_memory.available() * _CPU_SHARE * utilization)


def workspace_bytes(
    cfg: ModelConfig, dtype: torch.dtype, *, num_tokens: int, num_seqs: int, depth: int, ranks: int
) -> int:
    """GPU memory of steps of up to `num_tokens` rows, without weights and cache: absorbed weights, inputs and outputs
    of experts, logits and their sampling workspace, scores of the indexer, tables and graphs."""
    heads, vocab_size = cfg.num_attention_heads // ranks, cfg.vocab_size // ranks
    absorbed = heads * (cfg.qk_nope_head_dim + cfg.v_head_dim) * cfg.kv_lora_rank * dtype.itemsize
    rows = num_tokens * (cfg.num_experts_per_tok + 1) * cfg.hidden_size * 8
    num_logits = max(num_seqs * (1 + depth), _PROMPT_LOGITS) * vocab_size
    logits = num_logits * 16 + min(num_logits, MAX_SEARCHED) * SEARCH_BYTES
    tables = num_seqs * (cfg.vocab_size * 5 + cfg.max_position_embeddings * 8)
    graphs = cfg.num_layers_with_mtp * _GRAPH_BYTES
    return absorbed * cfg.num_layers_with_mtp + rows + logits + tables + graphs + _SCORES_BYTES


def plan_cache(
    cfg: ModelConfig,
    dtype: torch.dtype,
    layout: Layout = "auto",
    *,
    mtp: bool = False,
    max_model_len: int | None,
    max_num_seqs: int,
    memory: int,
) -> tuple[int, int]:
    """(max_model_len, number of pages) for a `KVCache` that takes at most `memory` bytes, its dump page included.

    Without a `max_model_len`, it is the model's longest or what fits. Raises ConfigError if a given one is longer than
    the model supports or does not fit.
    """
    per_page = KVCache.bytes_per_page(cfg, dtype, layout, mtp=mtp)
    fits = max(0, memory // per_page - 1) * PAGE_SIZE
    check_length(cfg, max_model_len)
    check_count("max_num_seqs", max_num_seqs)
    if not fits:
        raise ConfigError(
            f"the cache: {memory:,} bytes are free for it, and a page of {PAGE_SIZE} tokens, together with the dump "
            f"page, takes {2 * per_page:,}; raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    length = max_model_len or min(cfg.max_position_embeddings, fits)
    if length > fits:
        need, gib = (-(-length // PAGE_SIZE) + 1) * per_page, 2**30
        raise ConfigError(
            f"max_model_len: {length} tokens take {need / gib:.2f} GiB of cache and {memory / gib:.2f} GiB are free "
            f"for it; allowed here: up to {fits}"
        )
    return length, min(-(-length // PAGE_SIZE) * max_num_seqs, fits // PAGE_SIZE)


def planned_length(cfg: ModelConfig, max_model_len: int | None, num_pages: int) -> int:
    """max_model_len for a given number of pages, by the rule of `plan_cache`. Raises ConfigError likewise."""
    check_length(cfg, max_model_len)
    holds = num_pages * PAGE_SIZE
    if max_model_len is not None and max_model_len > holds:
        raise ConfigError(
            f"num_gpu_blocks_override: got {num_pages}, pages for {holds} tokens; allowed: at least "
            f"{-(-max_model_len // PAGE_SIZE)}, for one request of max_model_len {max_model_len}"
        )
    return max_model_len or min(cfg.max_position_embeddings, holds)
