"""Training steps by several processes, and by one, on the same rows: what they lost and their gradients.

Processes are forked from a server that has imported everything once, and meet over gloo on this machine.
"""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from glm5.config.model import ModelConfig
from glm5.config.parallel import ParallelConfig
from glm5.config.step import LoraConfig, LossConfig, OptimizerConfig
from glm5.model.glm5 import Glm5
from glm5.parallel.rendezvous import Rendezvous, store_at
from glm5.train.batch import Batch
from glm5.train.lora import adapt
from glm5.train.master_weights import MasterWeights
from glm5.train.objective import Objective
from glm5.train.optim.build import Optimizers
from glm5.train.parallel.build import build, fill, outline, put_rows, take_rows
from glm5.train.parallel.context import BatchShard
from glm5.train.parallel.mesh import mesh_of
from glm5.train.parallel.pipeline import PipelineStep
from glm5.train.parallel.step import DistributedStep, shards_of
from glm5.train.parallel.training_group import TrainingGroup
from glm5.train.step import Phase, Step
from tests.support.parity import BASE, randomize
from tests.support.replay import Choices, Recorder, Replayer

SECONDS = 120  # that any of it may take
ROWS = [[9, 15], [24], [20, 3], [17]]  # lengths of the sequences of a step's rows
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 6,
    "index_topk_pattern": "FSFF",
    "num_nextn_predict_layers": 1,
}


@dataclass(frozen=True)
class Job:
    """Some steps. `world` processes, or one without any of it."""

    world: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    phase: Phase = field(default_factory=lambda: Phase("sparse", learn_index=True))
    dtype: torch.dtype = torch.float64
    compute: torch.dtype | None = None
    """Of passes, where weights are wider."""
    device: str = "cpu"
    """cuda: each rank has the GPU of its number."""
    steps: int = 3
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    losses: LossConfig = field(default_factory=lambda: LossConfig(mtp_depth=2, balance_weight=0.01))
    trains: Callable[[str], bool] = bool
    lora: LoraConfig | None = None
    config: tuple[tuple[str, Any], ...] = ()
    objective: Objective | None = None
    """Other than the next token's."""
    rows: "Callable[[Job, int], list[Batch]]" = field(default_factory=lambda: random_rows)
    """The rows of a step of a number, in host memory."""
    merged: bool = False
    """All rows of a rank in one pass: each needs as many passes as the others, not as many rows."""
    skewed: bool = False
    """A control: a rank learns from a row of another step."""
    records: bool = False
    """Note choices of experts and keys; `replays` are such notes to follow."""
    replays: Choices | None = None

    @property
    def cfg(self) -> ModelConfig:
        return ModelConfig.from_dict(BASE | SMALL | dict(self.config))

    def model(self) -> Glm5:
        model = Glm5(self.cfg)
        randomize(model, seed=3)
        model = model.to(self.dtype)
        self.choose(model)
        return model

    def choose(self, model: Glm5) -> None:
        """What learns: parameters, or adapters that are put beside them."""
        if self.lora is not None:
            adapt(model, self.lora, seed=4)
            model.to(self.dtype)
            return
        for name, weight in model.named_parameters():
            weight.requires_grad_(self.trains(name))


@dataclass
class Done:
    """Figures of each step, gradients before clipping of each, and the weights behind the last."""

    metrics: list[dict[str, float]]
    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    choices: Choices | None = None
    flips: tuple[int, int] = (0, 0)
    """Of `replays`: choices that would have been others, of all."""


def rows_of_step(job: Job, step: int, device: torch.device) -> list[Batch]:
    return [batch.to(device) for batch in job.rows(job, step)]


def random_rows(job: Job, step: int) -> list[Batch]:
    gen = torch.Generator().manual_seed(100 + step)
    batches: list[Batch] = []
    for lengths in ROWS:
        ids = torch.randint(2, job.cfg.vocab_size, (sum(lengths),), generator=gen)
        weights = torch.randint(0, 3, (sum(lengths),), generator=gen).to(job.dtype) / 2
        batches.append(Batch(ids, weights, lengths))
    return batches


class Kept(Optimizers):
    """Keeps the gradients of each step, as they were before clipping."""

    grads: list[dict[str, Tensor]]

    def clip(self) -> dict[str, Tensor]:
        kept = {name: one.grad.clone() for name, one in self.named.items() if one.grad is not None}
        self.grads = [*getattr(self, "grads", []), kept]
        return super().clip()


def alone(job: Job) -> Done:
    model, device = job.model().to(job.device), torch.device(job.device)
    masters = None if job.compute is None else MasterWeights(model, job.compute)
    named = dict(model.named_parameters()) if masters is None else masters.trained()
    optimizers = Kept(named, model.cfg, job.optimizer)
    step = Step(model, optimizers, job.losses, job.phase, masters, job.objective)
    recorder = Recorder(step) if job.records else None
    metrics: list[dict[str, float]] = []
    for number in range(job.steps):
        rows = rows_of_step(job, number, device)
        if recorder is not None:
            recorder.over(number, list(enumerate(rows)))
        metrics.append(step.run(rows, 0.01))
    if recorder is not None:
        recorder.close()
    weights = {name: one.detach() for name, one in model.state_dict().items()}
    return Done(metrics, optimizers.grads, weights, None if recorder is None else recorder.choices)


def together(job: Job) -> Done:
    return run_ranks(job.world, _rank, job)[0]


def run_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(rank, port, *args)` returns on each of `world` ranks. RuntimeError with what a rank raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.sharded"])
    rendezvous = Rendezvous()
    store = rendezvous.open(world)
    links = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_child, args=(link[1], work, rank, rendezvous.port, args), daemon=True)
        for rank, link in enumerate(links)
    ]
    try:
        for process in processes:
            process.start()
        results: list[Any] = []
        failed: list[str] = []
        for rank, (reading, writing) in enumerate(links):
            writing.close()
            if not reading.poll(SECONDS):
                raise RuntimeError(f"rank {rank} of {world} says nothing")
            ok, result = pickle.loads(reading.recv_bytes())
            results.append(result)
            failed += [] if ok else [f"rank {rank}: {result}"]
        if failed:  # those that lost another one say less than that one
            raise RuntimeError("\n".join(sorted(failed, key=lambda said: "closed by peer" in said)))
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store
    return results


def _child(link: Any, work: Callable[..., Any], rank: int, port: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        result = (True, work(rank, port, *args))
    except BaseException:  # noqa: BLE001 - whatever it is, it is for who waits
        result = (False, traceback.format_exc())
    link.send_bytes(pickle.dumps(result))  # tensors as bytes, not as files that end with this process
    link.close()


def _rank(rank: int, port: int, job: Job) -> Done:
    mesh = mesh_of(job.parallel, job.world)
    device = torch.device("cpu") if job.device == "cpu" else torch.device("cuda", rank)
    team = TrainingGroup(mesh, rank, device, store_at(port, job.world), timeout_s=SECONDS)
    depth = job.losses.mtp_depth
    model = outline(job.cfg, job.dtype)
    job.choose(model)
    compute, has_base = job.compute or job.dtype, job.lora is not None
    part = build(model, team, job.parallel, dtype=job.dtype, compute=compute, mtp_depth=depth, has_base=has_base)
    whole = job.model().state_dict()
    fill(part, rank, lambda name, spans: take_rows(whole[name], spans), whole.__getitem__)
    optimizers = Kept(part.local, job.cfg, job.optimizer, shards_of(part.layout, team))
    if mesh.pipeline == 1:
        step = DistributedStep(part.roots[0], team, optimizers, job.losses, job.phase, job.objective)
    else:
        most = max(len(batch.ids_T) for number in range(job.steps) for batch in _mine(job, team, number))
        step = PipelineStep(part, team, optimizers, job.losses, job.phase, job.objective, tokens=most)
    replayer = None if job.replays is None else Replayer(step, job.replays)
    metrics: list[dict[str, float]] = []
    for number in range(job.steps):
        own = _mine(job, team, number)
        if replayer is not None:
            replayer.over(number, list(zip(mesh.rows(len(ROWS), rank), own, strict=True)))
        metrics.append(step.run(own, 0.01))
    grads = [_joined(team, part.layout, kept) for kept in optimizers.grads]
    weights = _joined(team, part.layout, {name: one.detach() for name, one in part.local.items()})
    weights |= _buffers(team, part.buffers)
    flips = torch.zeros(2) if replayer is None else torch.tensor([replayer.flips, replayer.requested])
    flipped, requested = team.total(flips.double()).tolist()
    return Done(metrics, grads, weights, None, (int(flipped), int(requested)))


def _mine(job: Job, team: TrainingGroup, number: int) -> list[Batch]:
    rows, mesh = rows_of_step(job, number, team.device), team.mesh
    if job.skewed and team.rank == mesh.size - 1:
        rows = rows_of_step(job, number + 1, team.device)
    own = [rows[i] for i in mesh.rows(len(rows), team.rank)]
    if job.merged:
        ids, weights = (torch.cat([getattr(one, name) for one in own]) for name in ("ids_T", "weight_T"))
        own = [Batch(ids, weights, [length for one in own for length in one.lengths])]
    if mesh.context == 1:
        return own
    return [BatchShard(row, mesh.part(team.rank), mesh.context) for row in own]


def _buffers(team: TrainingGroup, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all stages."""
    found: list[Any] = [None] * team.mesh.size
    dist.all_gather_object(found, {name: one.cpu() for name, one in own.items()})
    return {name: one for buffers in found for name, one in buffers.items()}


def _joined(team: TrainingGroup, layout: Any, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' rows; {} on all but the first."""
    found: list[Any] = [None] * team.mesh.size
    dist.all_gather_object(found, {name: one.cpu() for name, one in local.items()})
    if team.rank:
        return {}
    names = dict.fromkeys(name for parts in found for name in parts)
    whole: dict[str, Tensor] = {}
    for name in names:
        whole[name] = torch.full(layout.shapes[name], float("nan"), dtype=next(iter(local.values())).dtype)
        for rank, parts in enumerate(found):
            if name in parts:
                put_rows(whole[name], layout.spans(name, rank), parts[name])
    return whole
