"""What each process of a run needs: memory at the peak of its step, what it sends, and time, without training.

    shards        its rows of weights, gradients and optimizer state
    gathered      whole weights of what runs: embedding, head, indexers and MTP for the pass, two layers at a time
    sums          whole gradients of these, and what is added up in float32
    activations   of its tokens in its layers, once for each pass that is under way; latents of all tokens of a context
    sent          weights, gradients, tokens to experts, latents, the residual stream, cut matrices of Muon

Of all processes the one that needs most is told. Compared with counted peaks in the tests.
"""

import math
import re
import shutil
from collections.abc import Mapping
from typing import NamedTuple

from glm5.checkpoint.dense_mla import config_to_train
from glm5.checkpoint.resolve import resolve
from glm5.config.model import ModelConfig
from glm5.config.tensors import count_parameters
from glm5.config.train import Recipe, StageConfig
from glm5.train.estimate import (
    EFFICIENCY,
    GIB,
    element_bytes,
    existing,
    kept_numbers,
    logit_bytes,
    long,
    matmul_speed,
    outlined,
    resolved,
    room,
    state_bytes,
    states_of,
)
from glm5.train.metrics import flops_per_token
from glm5.train.optim.build import INDEXER, cut_of
from glm5.train.optim.exchange import Exchange
from glm5.train.optim.table import row_sizes, rule_of
from glm5.train.parallel.mesh import Mesh, check_stage, mesh_of
from glm5.train.parallel.row_layout import RowLayout, is_expert_sharded
from glm5.train.schedule import Schedule
from glm5.train.stage_trainer import device_of
from glm5.train.stages import longer, losses_of, phase_of

LINK = {"cuda": 2e11, "cpu": 1e9}
"""Bytes a second that a process sends: GPUs of one host, sockets of one machine; rough."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(mlp\.experts\.)?")
_WIDE = 4  # bytes of what is added up


class Held(NamedTuple):
    """Of one parameter: elements as a whole (of this rank's experts, where they are dealt out), and of its rows."""

    whole: int
    mine: int
    trained: bool


def estimate_shared(recipe: Recipe, world: int) -> str:
    """The text of `--dry-run` for `world` processes. Raises ConfigError where something cannot be dealt out."""
    section = recipe.model
    of_checkpoint = None if section.checkpoint is None else config_to_train(resolve(section.checkpoint), section.config)
    cfg, mesh = section.architecture(of_checkpoint), mesh_of(recipe.parallel, world)
    count, device = count_parameters(cfg), device_of(recipe.device)
    on_gpu = device.type == "cuda"
    has = room(device) if on_gpu else room(device) / world
    speed = matmul_speed(device) if on_gpu else matmul_speed(device) / world
    dealt = ", ".join(f"{name} {getattr(mesh, name)}" for name in ("pipeline", "data", "context", "expert"))
    lines = [
        f"model: {count.with_mtp:,} parameters, {count.active:,} of them for a token beside embedding and head",
        f"processes: {world} ({dealt})",
        f"each: {device.type}, {has / GIB:.1f} GiB, {speed / 1e12:.3g} TFLOP/s in products of matrices",
    ]
    seconds = 0.0
    for stage in recipe.stage:
        check_stage(mesh, cfg, stage)
        # One rank of each pipeline stage: the first has no fewer rows than the others.
        each = [Need.of(cfg, recipe, stage, mesh, rank) for rank in range(0, world, mesh.shards)]
        most = max(each, key=lambda need: need.memory)
        took, sent = _step_seconds(cfg, stage, mesh, speed), max(need.sent for need in each)
        took += sent / LINK[device.type]
        seconds += took * stage.steps
        tokens = Schedule(stage).draws(stage.steps - 1).stop * stage.seq_len
        lines += [
            f"stage {stage.name} ({stage.kind}): {stage.steps:,} steps, {tokens:,} tokens, about {took:.3g} s a step",
            f"  a process: {most.parameters:,} parameters, about {most.memory / GIB:.3g} GiB ({_listed(most.parts)})",
            f"  sends about {sent / GIB:.3g} GiB a step ({_listed(most.sends)})",
        ]
        if most.memory > has:
            lines.append(f"  does not fit: {_advice(recipe, stage, mesh, most, has)}")
    lines += longer(recipe, cfg)
    free = shutil.disk_usage(existing(recipe.folder)).free
    state = state_bytes(cfg, recipe)
    lines.append(
        f"in all about {long(seconds)}; {recipe.folder}: {state / GIB:.3g} GiB for the states of all processes, "
        f"{free / GIB:.3g} free"
    )
    return "\n".join([*lines, resolved(recipe)])


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items() if size)


class Need(NamedTuple):
    """Of a process: elements that it has rows of, bytes at the peak by what they are for, and bytes sent in a step."""

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
    def of(cls, cfg: ModelConfig, recipe: Recipe, stage: StageConfig, mesh: Mesh, rank: int) -> "Need":
        size, computed = element_bytes(recipe)
        depth = _depth(cfg, recipe, stage)
        model = outlined(cfg, recipe, stage)
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        places = RowLayout(mesh, cfg, shapes, depth)
        held = {
            name: Held(
                weight.numel() // (mesh.expert if is_expert_sharded(name) else 1),
                math.prod(places.local_shape(name, rank)),
                weight.requires_grad,
            )
            for name, weight in model.named_parameters()
            if places.is_of(name, rank)
        }
        mine = sum(one.mine for one in held.values())
        trained = sum(one.mine for one in held.values() if one.trained)
        passes = _layers_run(places, mesh, rank, depth)
        numbers = kept_numbers(cfg, recipe, stage, passes, whole=mesh.context == 1)
        kept = _tokens(stage, mesh) * computed * numbers * _under_way(stage, mesh, rank)
        if stage.kind != "warmup":
            kept += _beside(cfg, stage, mesh, rank, passes) * computed
        is_last = mesh.last_stage in mesh.stages_of(rank)
        gathered, sums = _whole(held, cfg, mesh, computed, size)
        parts = {
            "weights": float(size * mine),
            "gradients": float(size * trained),
            "optimizer": float(
                sum(size * one.mine * states_of(n, recipe, stage) for n, one in held.items() if one.trained)
            ),
            "gathered": gathered,
            "sums": sums,
            "activations": kept,
            "logits": logit_bytes(cfg, min(losses_of(recipe, stage, 0).chunk, int(_tokens(stage, mesh)))) * is_last,
        }
        return cls(mine, parts, _sends(cfg, recipe, stage, places, rank, held))


def _whole(held: Mapping[str, Held], cfg: ModelConfig, mesh: Mesh, computed: int, size: int) -> tuple[float, float]:
    """Bytes of whole weights, and of their whole gradients, that exist at a time."""
    units: dict[tuple[str, str], list[tuple[str, Held]]] = {}
    for name, one in held.items():
        found = _LAYER.match(name)
        units.setdefault((found[1], found[2] or "") if found else ("", ""), []).append((name, one))
    stays = gradients = 0.0
    layers: list[float] = []
    sums: list[float] = []
    for (layer, is_experts), members in units.items():
        among = mesh.shards // mesh.expert if is_experts else mesh.shards
        copies = among > 1 or computed != size
        whole = sum(one.whole for _, one in members)
        learns = sum(one.whole for _, one in members if one.trained)
        kept = [one for name, one in members if not layer or int(layer) == cfg.num_hidden_layers or INDEXER in name]
        if mesh.pipeline > 1:
            stays += copies * computed * whole
            gradients += _WIDE * learns
            continue
        stays += copies * computed * sum(one.whole for one in kept)
        gradients += computed * sum(one.whole for one in kept if one.trained) * (not layer)
        layers.append(copies * computed * (whole - sum(one.whole for one in kept)))
        sums.append((computed + _WIDE) * learns)
    layers.sort(reverse=True)
    return stays + sum(layers[:2]), gradients + max(sums, default=0.0)


def _sends(
    cfg: ModelConfig, recipe: Recipe, stage: StageConfig, places: RowLayout, rank: int, held: Mapping[str, Held]
) -> dict[str, float]:
    mesh, computed = places.mesh, element_bytes(recipe)[1]
    depth = _depth(cfg, recipe, stage)
    rows = -(-stage.sequences // mesh.data)
    tokens = rows * stage.seq_len / mesh.context
    gathers = 1 if mesh.pipeline > 1 else _num_passes(stage, mesh)
    weights = gradients = 0.0
    for name, one in held.items():
        among = mesh.shards // mesh.expert if is_expert_sharded(name) else mesh.shards
        others = one.whole * (among - 1) / among
        is_layer = _LAYER.match(name) is not None and INDEXER not in name and mesh.pipeline == 1
        weights += others * computed * gathers * (2 if is_layer else 1)
        gradients += others * _WIDE * gathers * one.trained
    passes = _layers_run(places, mesh, rank, depth)
    dense = sum(not cfg.is_moe(layer) for layer in places.layers_of(rank))
    travelling = (mesh.expert - 1) / mesh.expert * cfg.num_experts_per_tok * cfg.hidden_size
    latent = cfg.kv_lora_rank + cfg.qk_rope_head_dim + cfg.index_head_dim
    both = 1 if stage.kind == "warmup" else 2
    return {
        "weights": weights,
        "gradients": gradients,
        "experts": 2 * both * computed * tokens * travelling * (passes - dense),
        "latents": (computed + _WIDE * (both - 1)) * tokens * latent * (mesh.context - 1) * passes,
        "residual stream": both * computed * tokens * cfg.hidden_size * mesh.stages * (mesh.pipeline > 1),
        "muon": _muon_bytes(cfg, recipe, stage, places, rank, held),
    }


def _muon_bytes(
    cfg: ModelConfig, recipe: Recipe, stage: StageConfig, places: RowLayout, rank: int, held: Mapping[str, Held]
) -> float:
    mesh, optimizer = places.mesh, stage.optimizer or recipe.optimizer
    ranks = mesh.stage_ranks(rank)
    cuts = {
        name: cut_of(
            places.shapes[name],
            row_sizes(rule_of(name, optimizer), cfg),
            [places.spans(name, one) for one in ranks],
        )
        for name, one in held.items()
        if one.trained and rule_of(name, optimizer).optimizer == "muon"
    }
    exchange = Exchange(cuts, mesh.shard(rank), mesh.shards, list)
    return float(exchange.bytes_sent(element_bytes(recipe)[0]))


def _step_seconds(cfg: ModelConfig, stage: StageConfig, mesh: Mesh, speed: float) -> float:
    """Of computing, a pipeline's waiting included."""
    num_passes = _num_passes(stage, mesh)
    flops = flops_per_token(cfg, stage.seq_len, phase_of(stage)) * stage.sequences * stage.seq_len
    waits = (num_passes + (mesh.pipeline - 1) / mesh.stages) / num_passes
    return flops * waits / mesh.size / (EFFICIENCY * speed)


def _depth(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> int:
    return losses_of(recipe, stage, 0).mtp_depth if cfg.num_nextn_predict_layers else 0


def _tokens(stage: StageConfig, mesh: Mesh) -> float:
    """Of a pass of one process."""
    return (stage.pass_sequences or -(-stage.sequences // mesh.data)) * stage.seq_len / mesh.context


def _layers_run(places: RowLayout, mesh: Mesh, rank: int, depth: int) -> int:
    """In a pass of this rank."""
    return len(places.layers_of(rank)) + depth * (mesh.last_stage in mesh.stages_of(rank))


def _under_way(stage: StageConfig, mesh: Mesh, rank: int) -> float:
    """Passes through all of its stages whose activations exist at a time."""
    num_passes = _num_passes(stage, mesh)
    left = mesh.pipeline - mesh.stage(rank)
    if mesh.stages == 1:
        return min(left, num_passes)
    first = (mesh.stages - 1) * mesh.pipeline + 2 * left - 1  # of one stage each, before the first goes back
    return min(num_passes, first / mesh.stages)


def _num_passes(stage: StageConfig, mesh: Mesh) -> int:
    """Of a step."""
    rows = -(-stage.sequences // mesh.data)
    return -(-rows // (stage.pass_sequences or rows))


def _beside(cfg: ModelConfig, stage: StageConfig, mesh: Mesh, rank: int, passes: int) -> float:
    """Numbers kept because tokens travel: rows at experts and what they make of them, latents of the other ranks."""
    tokens = _tokens(stage, mesh) * _under_way(stage, mesh, rank)
    experts = 2 * cfg.num_experts_per_tok * cfg.hidden_size if mesh.expert > 1 else 0
    latents = (mesh.context - 1) * (cfg.kv_lora_rank + cfg.qk_rope_head_dim + cfg.index_head_dim)
    return tokens * passes * (experts + latents)


def _advice(recipe: Recipe, stage: StageConfig, mesh: Mesh, need: Need, has: float) -> str:
    """What to change so that it fits, the cheapest first."""
    parts, over = need.parts, need.memory - has
    sequences = stage.pass_sequences or -(-stage.sequences // mesh.data)
    if sequences > 1 and parts["activations"] * (1 - 1 / sequences) > over:
        return f"pass_sequences = {max(1, int(sequences * (1 - over / parts['activations'])))} in place of {sequences}"
    if recipe.model.dtype == "float32" and recipe.lora is None:
        return 'model.dtype = "bfloat16", which halves shards and what is gathered'
    of_shards = parts["weights"] + parts["gradients"] + parts["optimizer"]
    left = has - (need.memory - of_shards)
    if left > 0:
        more = math.ceil(of_shards * mesh.size / left / mesh.size) * mesh.size
        return f"more processes: about {more}, each with less of weights, gradients and optimizer state"
    if parts["activations"] > over / 2 and mesh.context < 8:
        return f"parallel.context = {2 * mesh.context}, and as many more processes: each has fewer tokens of a sequence"
    if parts["gathered"] + parts["sums"] > over / 2 and mesh.expert == 1:
        return "parallel.expert, so that experts are not gathered"
    return "parallel.pipeline with more stages, a shorter seq_len, or a smaller model"
