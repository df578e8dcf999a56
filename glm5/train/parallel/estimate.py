"""Estimates what each process of a distributed run needs: peak memory, bytes sent per step, and time.

    shards        its rows of weights, gradients and optimizer state
    gathered      unsharded weights: embedding, head, indexers and MTP for a pass, and two layers at a time
    sums          unsharded gradients of these, and float32 buffers of reductions
    activations   of its tokens in its layers, for each pass in flight; latents of all tokens of a context
    sent          weights, gradients, tokens to experts, latents, the residual stream, matrices split for Muon

Reports the process with the highest memory. The tests compare the estimates with measured peaks.
"""

import math
import re
import shutil
from collections.abc import Mapping
from typing import NamedTuple

from glm5.config.model import ModelConfig
from glm5.config.tensors import count_parameters
from glm5.config.train import Recipe, StageConfig
from glm5.train.build import model_config
from glm5.train.estimate import (
    EFFICIENCY,
    GIB,
    device_memory,
    element_bytes,
    existing_parent,
    format_duration,
    kept_values,
    logit_bytes,
    matmul_speed,
    meta_model,
    recipe_json,
    state_bytes,
    states_per_element,
)
from glm5.train.metrics import flops_per_token
from glm5.train.optim.build import INDEXER, row_split
from glm5.train.optim.exchange import Exchange
from glm5.train.optim.table import row_sizes, rule_of
from glm5.train.parallel.mesh import Mesh, check_stage, mesh_of
from glm5.train.parallel.row_layout import RowLayout, is_expert_sharded
from glm5.train.schedule import Schedule
from glm5.train.stage_trainer import device_of
from glm5.train.stages import long_sequence_warnings, losses_of, phase_of

LINK = {"cuda": 2e11, "cpu": 1e9}
"""Rough bytes a second that a process sends: between GPUs of one host, over sockets of one machine."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(mlp\.experts\.)?")
_REDUCE_BYTES = 4  # of an element in reductions


class Sizes(NamedTuple):
    """Elements of a parameter: `full` gathered (only this rank's experts, if sharded), `local` in this rank's rows."""

    full: int
    local: int
    trained: bool


def estimate_distributed(recipe: Recipe, world: int) -> str:
    """The text of `--dry-run` for `world` processes. Raises ConfigError where something cannot be sharded evenly."""
    cfg, mesh = model_config(recipe.model), mesh_of(recipe.parallel, world)
    count, device = count_parameters(cfg), device_of(recipe.device)
    on_gpu = device.type == "cuda"
    available = device_memory(device) if on_gpu else device_memory(device) / world
    speed = matmul_speed(device) if on_gpu else matmul_speed(device) / world
    axes = ", ".join(f"{name} {getattr(mesh, name)}" for name in ("pipeline", "data", "context", "expert"))
    lines = [
        f"model: {count.with_mtp:,} parameters, {count.active:,} of them for a token beside embedding and head",
        f"processes: {world} ({axes})",
        f"each: {device.type}, {available / GIB:.1f} GiB, {speed / 1e12:.3g} TFLOP/s in products of matrices",
    ]
    seconds = 0.0
    for stage in recipe.stage:
        check_stage(mesh, cfg, stage)
        # One rank of each pipeline stage: no other has more rows than the first.
        each = [RankEstimate.of(cfg, recipe, stage, mesh, rank) for rank in range(0, world, mesh.shards)]
        most = max(each, key=lambda need: need.memory)
        sent = max(need.sent for need in each)
        step_s = _step_seconds(cfg, stage, mesh, speed) + sent / LINK[device.type]
        seconds += step_s * stage.steps
        tokens = Schedule(stage).draws(stage.steps - 1).stop * stage.seq_len
        lines += [
            f"stage {stage.name} ({stage.kind}): {stage.steps:,} steps, {tokens:,} tokens, about {step_s:.3g} s a step",
            f"  a process: {most.parameters:,} parameters, about {most.memory / GIB:.3g} GiB ({_in_gib(most.parts)})",
            f"  sends about {sent / GIB:.3g} GiB a step ({_in_gib(most.sends)})",
        ]
        if most.memory > available:
            lines.append(f"  does not fit: {_advice(recipe, stage, mesh, most, available)}")
    lines += long_sequence_warnings(recipe, cfg)
    free = shutil.disk_usage(existing_parent(recipe.folder)).free
    state = state_bytes(cfg, recipe)
    lines.append(
        f"in all about {format_duration(seconds)}; {recipe.folder}: {state / GIB:.3g} GiB for the states of all "
        f"processes, {free / GIB:.3g} free"
    )
    return "\n".join([*lines, recipe_json(recipe)])


def _in_gib(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items() if size)


class RankEstimate(NamedTuple):
    """For one rank: elements of its parameters, bytes at the peak by purpose, and bytes sent in a step by purpose."""

    parameters: int
    parts: dict[str, float]
    sends: dict[str, float]

    @property
    def memory(self) -> float:
        return sum(self.parts.values())

    @property
    def sent(self) -> float:
        return sum(self.sends.values())

    @classmethod
    def of(cls, cfg: ModelConfig, recipe: Recipe, stage: StageConfig, mesh: Mesh, rank: int) -> "RankEstimate":
        size, computed = element_bytes(recipe)
        depth = _depth(cfg, recipe, stage)
        model = meta_model(cfg, recipe, stage)
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        layout = RowLayout(mesh, cfg, shapes, depth)
        sizes = {
            name: Sizes(
                weight.numel() // (mesh.expert if is_expert_sharded(name) else 1),
                math.prod(layout.local_shape(name, rank)),
                weight.requires_grad,
            )
            for name, weight in model.named_parameters()
            if layout.has_parameter(name, rank)
        }
        local = sum(one.local for one in sizes.values())
        trained = sum(one.local for one in sizes.values() if one.trained)
        passes = _layers_run(layout, mesh, rank, depth)
        numbers = kept_values(cfg, recipe, stage, passes, full_sequences=mesh.context == 1)
        kept = _tokens(stage, mesh) * computed * numbers * _passes_in_flight(stage, mesh, rank)
        if stage.kind != "warmup":
            kept += _communication_values(cfg, stage, mesh, rank, passes) * computed
        is_last = mesh.last_stage in mesh.stages_of(rank)
        gathered, sums = _gathered(sizes, cfg, mesh, computed, size)
        parts = {
            "weights": float(size * local),
            "gradients": float(size * trained),
            "optimizer": float(
                sum(size * one.local * states_per_element(n, recipe, stage) for n, one in sizes.items() if one.trained)
            ),
            "gathered": gathered,
            "sums": sums,
            "activations": kept,
            "logits": logit_bytes(cfg, min(losses_of(recipe, stage, 0).chunk, int(_tokens(stage, mesh)))) * is_last,
        }
        return cls(local, parts, _bytes_sent(cfg, recipe, stage, layout, rank, sizes))


def _gathered(
    sizes: Mapping[str, Sizes], cfg: ModelConfig, mesh: Mesh, computed: int, size: int
) -> tuple[float, float]:
    """Peak bytes of unsharded weights, and of their unsharded gradients."""
    units: dict[tuple[str, str], list[tuple[str, Sizes]]] = {}
    for name, one in sizes.items():
        found = _LAYER.match(name)
        units.setdefault((found[1], found[2] or "") if found else ("", ""), []).append((name, one))
    stays = gradients = 0.0
    layers: list[float] = []
    sums: list[float] = []
    for (layer, is_experts), members in units.items():
        num_sharers = mesh.shards // mesh.expert if is_experts else mesh.shards
        copies = num_sharers > 1 or computed != size
        full = sum(one.full for _, one in members)
        learns = sum(one.full for _, one in members if one.trained)
        kept = [one for name, one in members if not layer or int(layer) == cfg.num_hidden_layers or INDEXER in name]
        if mesh.pipeline > 1:
            stays += copies * computed * full
            gradients += _REDUCE_BYTES * learns
            continue
        stays += copies * computed * sum(one.full for one in kept)
        gradients += computed * sum(one.full for one in kept if one.trained) * (not layer)
        layers.append(copies * computed * (full - sum(one.full for one in kept)))
        sums.append((computed + _REDUCE_BYTES) * learns)
    layers.sort(reverse=True)
    return stays + sum(layers[:2]), gradients + max(sums, default=0.0)


def _bytes_sent(
    cfg: ModelConfig, recipe: Recipe, stage: StageConfig, layout: RowLayout, rank: int, sizes: Mapping[str, Sizes]
) -> dict[str, float]:
    mesh, computed = layout.mesh, element_bytes(recipe)[1]
    depth = _depth(cfg, recipe, stage)
    rows = -(-stage.sequences // mesh.data)
    tokens = rows * stage.seq_len / mesh.context
    gathers = 1 if mesh.pipeline > 1 else _num_passes(stage, mesh)
    weights = gradients = 0.0
    for name, one in sizes.items():
        num_sharers = mesh.shards // mesh.expert if is_expert_sharded(name) else mesh.shards
        others = one.full * (num_sharers - 1) / num_sharers
        is_layer = _LAYER.match(name) is not None and INDEXER not in name and mesh.pipeline == 1
        weights += others * computed * gathers * (2 if is_layer else 1)
        gradients += others * _REDUCE_BYTES * gathers * one.trained
    passes = _layers_run(layout, mesh, rank, depth)
    dense = sum(not cfg.is_moe(layer) for layer in layout.layers_of(rank))
    dispatched = (mesh.expert - 1) / mesh.expert * cfg.num_experts_per_tok * cfg.hidden_size
    latent = cfg.kv_lora_rank + cfg.qk_rope_head_dim + cfg.index_head_dim
    directions = 1 if stage.kind == "warmup" else 2
    return {
        "weights": weights,
        "gradients": gradients,
        "experts": 2 * directions * computed * tokens * dispatched * (passes - dense),
        "latents": (computed + _REDUCE_BYTES * (directions - 1)) * tokens * latent * (mesh.context - 1) * passes,
        "residual stream": directions * computed * tokens * cfg.hidden_size * mesh.stages * (mesh.pipeline > 1),
        "muon": _muon_bytes(cfg, recipe, stage, layout, rank, sizes),
    }


def _muon_bytes(
    cfg: ModelConfig, recipe: Recipe, stage: StageConfig, layout: RowLayout, rank: int, sizes: Mapping[str, Sizes]
) -> float:
    mesh, optimizer = layout.mesh, stage.optimizer or recipe.optimizer
    ranks = mesh.stage_ranks(rank)
    cuts = {
        name: row_split(
            layout.shapes[name],
            row_sizes(rule_of(name, optimizer), cfg),
            [layout.spans(name, one) for one in ranks],
        )
        for name, one in sizes.items()
        if one.trained and rule_of(name, optimizer).optimizer == "muon"
    }
    exchange = Exchange(cuts, mesh.shard(rank), mesh.shards, list)
    return float(exchange.bytes_sent(element_bytes(recipe)[0]))


def _step_seconds(cfg: ModelConfig, stage: StageConfig, mesh: Mesh, speed: float) -> float:
    """Seconds of computation in a step, with the pipeline's bubble."""
    num_passes = _num_passes(stage, mesh)
    flops = flops_per_token(cfg, stage.seq_len, phase_of(stage)) * stage.sequences * stage.seq_len
    waits = (num_passes + (mesh.pipeline - 1) / mesh.stages) / num_passes
    return flops * waits / mesh.size / (EFFICIENCY * speed)


def _depth(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> int:
    return losses_of(recipe, stage, 0).mtp_depth if cfg.num_nextn_predict_layers else 0


def _tokens(stage: StageConfig, mesh: Mesh) -> float:
    """Tokens in a pass of one process."""
    return (stage.pass_sequences or -(-stage.sequences // mesh.data)) * stage.seq_len / mesh.context


def _layers_run(layout: RowLayout, mesh: Mesh, rank: int, depth: int) -> int:
    """Layers that a pass of this rank runs, MTP's repetitions included."""
    return len(layout.layers_of(rank)) + depth * (mesh.last_stage in mesh.stages_of(rank))


def _passes_in_flight(stage: StageConfig, mesh: Mesh, rank: int) -> float:
    """Passes through all stages of a rank whose activations exist at the same time."""
    num_passes = _num_passes(stage, mesh)
    left = mesh.pipeline - mesh.stage(rank)
    if mesh.stages == 1:
        return min(left, num_passes)
    first = (mesh.stages - 1) * mesh.pipeline + 2 * left - 1  # forward passes of a stage before the first backward
    return min(num_passes, first / mesh.stages)


def _num_passes(stage: StageConfig, mesh: Mesh) -> int:
    """Passes of a process in a step."""
    rows = -(-stage.sequences // mesh.data)
    return -(-rows // (stage.pass_sequences or rows))


def _communication_values(cfg: ModelConfig, stage: StageConfig, mesh: Mesh, rank: int, passes: int) -> float:
    """Values saved because of communication: inputs and outputs of experts, latents of the other ranks."""
    tokens = _tokens(stage, mesh) * _passes_in_flight(stage, mesh, rank)
    experts = 2 * cfg.num_experts_per_tok * cfg.hidden_size if mesh.expert > 1 else 0
    latents = (mesh.context - 1) * (cfg.kv_lora_rank + cfg.qk_rope_head_dim + cfg.index_head_dim)
    return tokens * passes * (experts + latents)


def _advice(recipe: Recipe, stage: StageConfig, mesh: Mesh, need: RankEstimate, available: float) -> str:
    """What to change so that it fits; the cheapest change that helps."""
    parts, over = need.parts, need.memory - available
    sequences = stage.pass_sequences or -(-stage.sequences // mesh.data)
    if sequences > 1 and parts["activations"] * (1 - 1 / sequences) > over:
        return f"pass_sequences = {max(1, int(sequences * (1 - over / parts['activations'])))} in place of {sequences}"
    if recipe.model.dtype == "float32" and recipe.lora is None:
        return 'model.dtype = "bfloat16", which halves shards and what is gathered'
    of_shards = parts["weights"] + parts["gradients"] + parts["optimizer"]
    left = available - (need.memory - of_shards)
    if left > 0:
        more = math.ceil(of_shards * mesh.size / left / mesh.size) * mesh.size
        return f"more processes: about {more}, each with less of weights, gradients and optimizer state"
    if parts["activations"] > over / 2 and mesh.context < 8:
        return f"parallel.context = {2 * mesh.context}, and as many more processes: each has fewer tokens of a sequence"
    if parts["gathered"] + parts["sums"] > over / 2 and mesh.expert == 1:
        return "parallel.expert, so that experts are not gathered"
    return "parallel.pipeline with more stages, a shorter seq_len, or a smaller model"
