"""One MoE layer of full size: forward, backward and optimizer, dense and sparse."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm5.bench.kernels.clock import milliseconds
from glm5.bench.train.counts import PEAK, dense_attention, index_scores, layer_active, sparse_attention
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.config.step import OptimizerConfig
from glm5.model.block import DecoderLayer
from glm5.model.packed import PackedView
from glm5.model.seams import Rope
from glm5.train.optim.build import INDEXER, Optimizers
from glm5.train.optim.newton_schulz import flops, orthogonalize

LAYER = 3
WARM, REPEATS = 2, 5


def layer_results(num_tokens: int, *, stage: str) -> dict[str, Any]:
    """Milliseconds of forward and of forward plus backward, MFU, memory. In `stage` sparse the indexer is trained."""
    cfg = preset("glm-5")
    layer = _made(cfg)
    x_TD = torch.randn(num_tokens, cfg.hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad_TD = torch.randn_like(x_TD) * 1e-3
    learns = stage == "sparse"
    for name, weight in layer.named_parameters():
        weight.requires_grad_(learns or INDEXER not in f".{name}")

    def forward() -> tuple[Tensor, PackedView]:
        view = PackedView([num_tokens], "cuda", stage="sparse" if learns else "dense", learn_index=learns)
        rope = Rope.at(view.positions_T, cfg.qk_rope_head_dim, cfg.rope_theta, x_TD)
        return layer(x_TD, rope, view, None)[0], view

    def forward_backward() -> None:
        out_TD, view = forward()
        if learns:
            torch.autograd.backward([out_TD, view.index_loss()], [grad_TD, None])
        else:
            out_TD.backward(grad_TD)
        layer.zero_grad()
        x_TD.grad = None

    torch.cuda.reset_peak_memory_stats()
    seconds = _timed(forward_backward)
    peak = torch.cuda.max_memory_allocated()
    forward_seconds = _timed(forward)
    attention = sparse_attention(cfg, num_tokens) if learns else dense_attention(cfg, num_tokens)
    num_flops = 6 * layer_active(cfg, indexer=learns) * num_tokens + 3 * attention
    num_flops += index_scores(cfg, num_tokens) * learns
    return {
        "stage": stage,
        "tokens": num_tokens,
        "parameters": sum(one.numel() for one in layer.parameters()),
        "forward ms": forward_seconds * 1e3,
        "forward and backward ms": seconds * 1e3,
        "TFLOP": num_flops / 1e12,
        "mfu": num_flops / seconds / PEAK,
        "peak GiB": peak / 2**30,
    }


def optimizer_results() -> dict[str, Any]:
    """Milliseconds and memory of a step of Muon and AdamW with gradients and momentum in bfloat16."""
    layer = _made(preset("glm-5"))
    named = {f"model.layers.{LAYER}.{name}": weight for name, weight in layer.named_parameters()}
    optimizers = Optimizers(named, preset("glm-5"), OptimizerConfig(momentum_dtype="bfloat16"))
    for weight in named.values():
        weight.grad = torch.empty_like(weight).normal_(std=1e-3)
    torch.cuda.reset_peak_memory_stats()
    seconds = _timed(lambda: optimizers.step(1e-4), repeats=2)
    cfg = preset("glm-5")
    experts = cfg.n_routed_experts * 3 * flops(cfg.moe_intermediate_size, cfg.hidden_size)
    return {
        "optimizer ms": seconds * 1e3,
        "of experts TFLOP": experts / 1e12,
        "state GiB": optimizers.state_bytes() / 2**30,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def split_results() -> dict[str, Any]:
    """GFLOPs and milliseconds of q_b_proj's orthogonalisation, as one matrix and by heads."""
    cfg = preset("glm-5")
    rows, cols = cfg.num_attention_heads * cfg.qk_head_dim, cfg.q_lora_rank
    grad = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    heads = grad.view(cfg.num_attention_heads, cfg.qk_head_dim, cols)
    whole, split = flops(rows, cols), cfg.num_attention_heads * flops(cfg.qk_head_dim, cols)
    return {
        "whole GFLOP": whole / 1e9,
        "split GFLOP": split / 1e9,
        "whole ms": _timed(lambda: orthogonalize(grad)) * 1e3,
        "split ms": _timed(lambda: orthogonalize(heads)) * 1e3,
    }


def _made(cfg: ModelConfig) -> DecoderLayer:
    """Random weights on the GPU, without a copy in host memory."""
    with torch.device("meta"):
        layer = DecoderLayer(cfg, LAYER).to(torch.bfloat16)
    layer = layer.to_empty(device="cuda")
    gen = torch.Generator("cuda").manual_seed(0)
    for weight in layer.parameters():
        with torch.no_grad():
            weight.fill_(1.0) if weight.dim() < 2 else weight.normal_(std=weight.shape[-1] ** -0.5, generator=gen)
    for bias in layer.buffers():
        bias.zero_()
    return layer.train()


def _timed(run: Callable[[], object], *, repeats: int = REPEATS) -> float:
    """Median seconds."""
    for _ in range(WARM):
        run()
    return statistics.median(milliseconds(run) for _ in range(repeats)) / 1e3
