"""Steps of a small model: tokens per second by stage."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from glm5.bench.train.counts import PEAK
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.config.tensors import count_parameters
from glm5.config.train import read_recipe
from glm5.model.glm5 import Glm5
from glm5.model.init import init_weights
from glm5.train.batch import Batch
from glm5.train.loop import deterministic
from glm5.train.master_weights import MasterWeights
from glm5.train.metrics import flops_per_token
from glm5.train.optim.build import INDEXER, Optimizers
from glm5.train.step import Phase, Step

RECIPE = Path("recipes/active-100m.toml")
"""The recipe of the model; `glm5 train` trains it."""
PHASES = {
    "dense": Phase("dense"),
    "warmup": Phase("warmup", learn_index=True),
    "sparse": Phase("sparse", learn_index=True),
}


def small_results(stage: str, seq_len: int, sequences: int) -> dict[str, Any]:
    """Steps of RECIPE's architecture with random weights, in bfloat16 with float32 masters, on random tokens."""
    step = _step(stage)
    cfg, count = step.model.cfg, count_parameters(step.model.cfg)
    active = count.active + cfg.vocab_size * cfg.hidden_size
    about = {"stage": stage, "parameters": count.total, "active, with head": active}
    return about | _steps(step, seq_len, sequences)


def ordered_results(stage: str, seq_len: int, sequences: int) -> dict[str, Any]:
    """Steps of the same model with default algorithms, then with deterministic ones."""
    step = _step(stage)
    plain = _steps(step, seq_len, sequences)
    with deterministic(enabled=True):
        ordered = _steps(step, seq_len, sequences)
    about = {name: plain[name] for name in ("tokens a step", "context")}
    of_each = {"default": plain, "deterministic": ordered}
    shown = ("ms", "optimizer ms", "peak GiB")
    metrics = {f"{which} {name}": found[name] for which, found in of_each.items() for name in shown}
    return {"stage": stage, **about, **metrics, "longer": ordered["ms"] / plain["ms"] - 1}


def _step(stage: str) -> Step:
    cfg = read_recipe(RECIPE).model.architecture()
    model = Glm5(cfg)
    init_weights(model, 0)
    model = model.cuda().train()
    phase = PHASES[stage]
    for name, weight in model.named_parameters():
        weight.requires_grad_(phase.learn_index if INDEXER in name else stage != "warmup")
    masters = MasterWeights(model, torch.bfloat16)
    optimizers = Optimizers(masters.trained(), cfg, OptimizerConfig())
    return Step(model, optimizers, LossConfig(mtp_depth=0), phase, masters)


def _steps(step: Step, seq_len: int, sequences: int, *, steps: int = 6) -> dict[str, Any]:
    """Medians over steps after the second."""
    cfg, gen = step.model.cfg, torch.Generator().manual_seed(0)
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
        "tokens a step": num_tokens,
        "context": seq_len,
        "ms": took * 1e3,
        "optimizer ms": step.optimizer_time.seconds() * 1e3,
        "tokens/s": num_tokens / took,
        "mfu": flops_per_token(cfg, seq_len, step.phase) * num_tokens / took / PEAK,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "last loss": losses[-1],
    }
