"""Memory and time of attention forward and backward by length, over selected keys and over all earlier keys."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm5.config.presets import preset
from glm5.kernels.sequence_attention import sequence_attention
from glm5.kernels.sparse_mla import sparse_mla

WARM = 4096
"""Tokens of a first pass, in which kernels compile."""


def memory_results(num_tokens: int, *, dense: bool) -> dict[str, Any]:
    """Peak GiB of both passes without the inputs, and milliseconds. `dense`: expanded keys and values; otherwise
    selected keys."""
    made = _dense if dense else _sparse
    _timed(made(WARM))
    gc.collect()
    torch.cuda.empty_cache()
    run = made(num_tokens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward, backward = _timed(run)
    return {
        "attention": "dense" if dense else "sparse",
        "tokens": num_tokens,
        "inputs GiB": before / 2**30,
        "beside GiB": (torch.cuda.max_memory_allocated() - before) / 2**30,
        "forward ms": forward,
        "backward ms": backward,
    }


def _timed(run: Callable[[], Tensor]) -> tuple[float, float]:
    """Milliseconds of one pass forward and of the one backward."""
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    out = run()
    middle.record()
    out.backward(out.detach())
    end.record()
    end.synchronize()
    return begin.elapsed_time(middle), middle.elapsed_time(end)


def _dense(num_tokens: int) -> Callable[[], Tensor]:
    cfg = preset("glm-5")
    widths = cfg.qk_head_dim, cfg.qk_head_dim, cfg.v_head_dim
    q, k, v = (_leaf(num_tokens, cfg.num_attention_heads, width) for width in widths)
    return lambda: sequence_attention(q, k, v, [num_tokens], scale=cfg.qk_head_dim**-0.5)[0]


def _sparse(num_tokens: int) -> Callable[[], Tensor]:
    cfg = preset("glm-5")
    width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    q, pool = _leaf(num_tokens, cfg.num_attention_heads, width), _leaf(1, num_tokens, width)
    end_T = torch.arange(1, num_tokens + 1, device="cuda", dtype=torch.int32)
    where = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.zeros_like(end_T), end_T
    keys_TK = _keys(end_T, cfg.index_topk)
    sizes = {"scale": cfg.qk_head_dim**-0.5, "value_dim": cfg.kv_lora_rank}
    return lambda: sparse_mla(q, pool, keys_TK, *where, **sizes)[0]


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _keys(end_T: torch.Tensor, top_k: int) -> torch.Tensor:
    """Distinct visible keys of every query, ascending and evenly spaced, with an offset that depends on the query."""
    place_K = torch.arange(top_k, device="cuda", dtype=torch.int32)
    step_T1 = (end_T[:, None] // top_k).clamp_min(1)
    keys_TK = place_K * step_T1 + (end_T[:, None] % step_T1)
    return keys_TK.masked_fill(keys_TK >= end_T[:, None], -1)
