"""Steps of a model of 30 billion parameters over all GPUs of this machine: GLM-4.7-Flash's geometry, random weights.

Weights, gradients and Muon's momentum are bfloat16 and sharded by FSDP2; experts by expert parallelism. Attention is
dense, without MTP; tokens are random, which does not change the time of a step.
"""

import logging
import statistics
import time
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn

from glm5.bench.train.counts import PEAK
from glm5.common.log import configure
from glm5.config.model import ModelConfig
from glm5.config.parallel import ParallelConfig
from glm5.config.presets import preset
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.config.tensors import count_parameters
from glm5.parallel.rendezvous import Rendezvous, store_at
from glm5.train.batch import Batch
from glm5.train.metrics import flops_per_token
from glm5.train.optim.build import INDEXER, Optimizers
from glm5.train.parallel.build import ModelShard, build, outline
from glm5.train.parallel.mesh import mesh_of
from glm5.train.parallel.step import DistributedStep, shards_of
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.step import Phase

logger = logging.getLogger(__name__)

FLASH: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "q_lora_rank": 768,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "num_nextn_predict_layers": 0,
}
SEQ_LEN, STEPS, WARM = 4096, 20, 5
TIMEOUT_S = 120.0


def shape_results(num_layers: int, passes: int, sequences: int, *, steps: int = STEPS) -> dict[str, Any]:
    """Milliseconds of a step and of its optimizer, tokens/s, MFU and peak memory of one GPU. A step has `passes`
    micro-batches of `sequences` on each GPU."""
    # One unused indexer; the published model has none.
    few = {"num_hidden_layers": num_layers, "index_topk_pattern": "F" + "S" * (num_layers - 1)}
    cfg = preset("glm-5").replace(**(FLASH | few))
    world = torch.cuda.device_count()
    rendezvous, found = Rendezvous(), get_context("spawn").SimpleQueue()
    store = rendezvous.open(world)
    args = (world, rendezvous.port, cfg, [sequences] * passes, steps, found)
    spawn(_rank, args, nprocs=world)
    del store
    return found.get()


def _rank(
    rank: int,
    world: int,
    port: int,
    cfg: ModelConfig,
    passes: list[int],
    steps: int,
    found: "SimpleQueue[dict[str, Any]]",
) -> None:
    configure("info" if rank == 0 else "warning")
    parallel = ParallelConfig(expert=world)
    device = torch.device("cuda", rank)
    group = TrainingGroup(mesh_of(parallel, world), rank, device, store_at(port, world), timeout_s=TIMEOUT_S)
    dtype, losses = torch.bfloat16, LossConfig(mtp_depth=0, chunk=1024)
    model = outline(cfg, dtype)
    for name, weight in model.named_parameters():
        weight.requires_grad_(INDEXER not in name)
    part = build(model, group, parallel, dtype=dtype, compute=dtype, mtp_depth=0)
    _randomize(part, rank)
    optimizer = OptimizerConfig(momentum_dtype="bfloat16")
    optimizers = Optimizers(part.local, cfg, optimizer, shards_of(part.layout, group))
    step = DistributedStep(part.roots[0], group, optimizers, losses, Phase("dense"))
    gen = torch.Generator().manual_seed(rank)
    seconds: list[float] = []
    optimizer_seconds: list[float] = []
    for number in range(steps):
        batches = [_batch(cfg, sequences, gen).to(device) for sequences in passes]
        torch.cuda.synchronize()
        began = time.perf_counter()
        metrics = step.run(batches, 1e-4)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        optimizer_seconds.append(step.optimizer_time.seconds())
        peak = torch.cuda.max_memory_allocated() / 2**30
        logger.info(
            "step %d: %.3f s, optimizer %.3f, loss %.3f, %.1f GiB at most",
            number + 1, seconds[-1], optimizer_seconds[-1], metrics["loss"], peak,
        )  # fmt: skip
    group.wait()
    if rank == 0:
        found.put(_metrics(cfg, world, sum(passes), seconds, optimizer_seconds, optimizers))
    group.close()


def _metrics(
    cfg: ModelConfig,
    world: int,
    sequences: int,
    seconds: list[float],
    optimizer_seconds: list[float],
    optimizers: Optimizers,
) -> dict[str, Any]:
    count, tokens = count_parameters(cfg), sequences * SEQ_LEN
    step_seconds, optimizer_median = (statistics.median(one[WARM:]) for one in (seconds, optimizer_seconds))
    return {
        "GPUs": world,
        "layers": cfg.num_hidden_layers,
        "parameters": count.total,
        "active": count.active,
        "tokens a step and GPU": tokens,
        "ms": step_seconds * 1e3,
        "optimizer ms": optimizer_median * 1e3,
        "optimizer share": optimizer_median / step_seconds,
        "tokens/s a GPU": tokens / step_seconds,
        "mfu": flops_per_token(cfg, SEQ_LEN, Phase("dense")) * tokens / step_seconds / PEAK,
        "state GiB": optimizers.state_bytes() / 2**30,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "steps": len(seconds),
        "slowest ms behind the first": max(seconds[WARM:]) * 1e3,
    }


@torch.no_grad()
def _randomize(part: ModelShard, rank: int) -> None:
    gen = torch.Generator(next(iter(part.local.values())).device).manual_seed(rank)
    for name, weight in part.local.items():
        nn.init.ones_(weight) if "norm" in name else weight.normal_(std=0.02, generator=gen)
    for bias in part.buffers.values():
        bias.zero_()


def _batch(cfg: ModelConfig, sequences: int, gen: torch.Generator) -> Batch:
    ids = torch.randint(2, cfg.vocab_size, (sequences * SEQ_LEN,), generator=gen)
    return Batch(ids, torch.ones(len(ids)), [SEQ_LEN] * sequences)
