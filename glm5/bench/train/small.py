"""A small model's steps: tokens a second, stage by stage."""

import statistics
import time
from typing import Any

import torch

from glm5.bench.train.counts import PEAK
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.config.tensors import count_parameters
from glm5.model.glm5 import Glm5
from glm5.model.init import init_weights
from glm5.train.batch import Batch
from glm5.train.masters import Masters
from glm5.train.optim.build import INDEXER, Optimizers
from glm5.train.step import Phase, Step
from glm5.train.watch import flops_per_token

ACTIVE_100M: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "q_lora_rank": 384,
    "kv_lora_rank": 192,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 512,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 16384,
}
PHASES = {
    "dense": Phase("dense"),
    "warmup": Phase("warmup", learn_index=True),
    "sparse": Phase("sparse", learn_index=True),
}


def small_figures(stage: str, seq_len: int, sequences: int, *, steps: int = 6) -> dict[str, Any]:
    """Of a model with 100M active parameters in bfloat16 with masters in float32."""
    cfg: ModelConfig = preset("glm-5").replace(**ACTIVE_100M)
    model = Glm5(cfg)
    init_weights(model, 0)
    model = model.cuda().train()
    phase = PHASES[stage]
    for name, weight in model.named_parameters():
        weight.requires_grad_(phase.learn_index if INDEXER in name else stage != "warmup")
    masters = Masters(model, torch.bfloat16)
    optimizers = Optimizers(masters.trained(), cfg, OptimizerConfig())
    step = Step(model, optimizers, LossConfig(mtp_depth=0), phase, masters)
    gen = torch.Generator().manual_seed(0)
    num_tokens, seconds, losses = seq_len * sequences, [], []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        ids = torch.randint(2, cfg.vocab_size, (num_tokens,), generator=gen)
        batch = Batch(ids, torch.ones(num_tokens), [seq_len] * sequences).to("cuda")
        began = time.perf_counter()
        losses.append(step.run([batch], 1e-3)["loss"])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    took = statistics.median(seconds[2:])
    return {
        "stage": stage,
        "parameters": count_parameters(cfg).total,
        "active": count_parameters(cfg).active,
        "tokens a step": num_tokens,
        "context": seq_len,
        "ms": took * 1e3,
        "optimizer ms": step.optimizer_time.seconds() * 1e3,
        "tokens/s": num_tokens / took,
        "mfu": flops_per_token(cfg, seq_len, phase) * num_tokens / took / PEAK,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "last loss": losses[-1],
    }
