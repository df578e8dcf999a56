"""Estimates what a recipe needs: parameters, memory and time of each stage, and what to change if it does not fit.

    memory    weights + gradients + optimizer state + activations of one pass + logits of a chunk
    time      FLOPs / (measured speed of a matrix product * EFFICIENCY)

Activations are the tensors that layers save for the backward pass: per token some multiples of the widths, without
scores or copies of latents. The tests compare them with measured peaks.
"""

import json
import shutil
import time
from pathlib import Path

import torch

from glm5.common import host_memory
from glm5.config.model import ModelConfig
from glm5.config.step import Section
from glm5.config.tensors import count_parameters
from glm5.config.train import Recipe, StageConfig
from glm5.kernels.sequence_attention.flash import MAX_WIDTH
from glm5.model.glm5 import Glm5
from glm5.train.build import model_config
from glm5.train.lora import adapt
from glm5.train.metrics import flops_per_token
from glm5.train.optim.table import rule_of
from glm5.train.qat import check_widths
from glm5.train.schedule import Schedule
from glm5.train.stage_trainer import device_of
from glm5.train.stages import choose_parameters, long_sequence_warnings, losses_of, phase_of

EFFICIENCY = 0.3
"""Share of a matrix product's speed that training reaches. Rough: small models reach less."""
GIB = 2**30


def estimate(recipe: Recipe) -> str:
    """The text of `--dry-run`. Reads configs only; data are not opened."""
    cfg = model_config(recipe.model)
    if any(stage.qat is not None for stage in recipe.stage):
        check_widths(cfg)
    count = count_parameters(cfg)
    device = device_of(recipe.device)
    speed, available = matmul_speed(device), device_memory(device)
    lines = [
        f"model: {count.with_mtp:,} parameters, {count.active:,} of them for a token beside embedding and head",
        f"device: {device}, {available / GIB:.1f} GiB, {speed / 1e12:.3g} TFLOP/s in products of matrices",
    ]
    seconds = 0.0
    for stage in recipe.stage:
        parts = memory_parts(cfg, recipe, stage)
        needed = sum(parts.values())
        tokens = (Schedule(stage).draws(stage.steps - 1).stop) * stage.seq_len
        stage_seconds = flops_per_token(cfg, stage.seq_len, phase_of(stage)) * tokens / (EFFICIENCY * speed)
        seconds += stage_seconds
        listed = ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items())
        lines.append(
            f"stage {stage.name} ({stage.kind}): {stage.steps:,} steps, {tokens:,} tokens, "
            f"about {format_duration(stage_seconds)}; about {needed / GIB:.3g} GiB ({listed})"
        )
        if needed > available:
            lines.append(f"  does not fit: {_advice(recipe, stage, parts, needed - available)}")
    lines += long_sequence_warnings(recipe, cfg)
    state = state_bytes(cfg, recipe)
    free = shutil.disk_usage(existing_parent(recipe.folder)).free
    lines.append(
        f"in all about {format_duration(seconds)}; {recipe.folder}: {state / GIB:.3g} GiB for the state, "
        f"{free / GIB:.3g} free"
    )
    return "\n".join([*lines, recipe_json(recipe)])


def recipe_json(recipe: Section) -> str:
    return "recipe:\n" + json.dumps(json.loads(recipe.model_dump_json()), indent=2)


def memory_parts(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> dict[str, float]:
    """Bytes at the peak of a step, by purpose."""
    size, computed = element_bytes(recipe)
    trained, held = _trained(cfg, recipe, stage)
    tokens = (stage.pass_sequences or stage.sequences) * stage.seq_len
    losses = losses_of(recipe, stage, 0)
    passes = cfg.num_hidden_layers + (losses.mtp_depth if cfg.num_nextn_predict_layers else 0)
    return {
        "weights": (size + (computed if computed != size else 0)) * count_parameters(cfg).with_mtp,
        "gradients": size * trained,
        "optimizer": float(size * held),
        "activations": computed * tokens * kept_values(cfg, recipe, stage, passes),
        "logits": 0.0 if stage.kind == "reward" else logit_bytes(cfg, min(losses.chunk, tokens)),
    }


def logit_bytes(cfg: ModelConfig, num_tokens: int) -> float:
    """Bytes of the logits of `num_tokens` tokens in float32, with temporaries and gradients."""
    return float(3 * 4 * num_tokens * cfg.vocab_size)


def kept_values(
    cfg: ModelConfig, recipe: Recipe, stage: StageConfig, passes: float, *, full_sequences: bool = True
) -> float:
    """Values per token that `passes` layers save for the backward pass. `full_sequences`: False under context
    parallelism."""
    # Per head: query, key, value and output; or queries and outputs before and after absorption.
    latents = 2 * (cfg.kv_lora_rank + cfg.qk_rope_head_dim)
    more = cfg.v_head_dim if full_sequences and _expands(cfg, recipe, stage) else latents
    layer = 8 * cfg.hidden_size + cfg.num_attention_heads * (2 * cfg.qk_head_dim + cfg.v_head_dim + more)
    mlp = 3 * cfg.moe_intermediate_size * (cfg.num_experts_per_tok + cfg.n_shared_experts)
    # In warm-up the trunk has no backward pass: the tensors of one layer exist at a time.
    kept = float(layer + mlp)
    if stage.kind != "warmup":
        of_layer = {None: layer + mlp, "mlp": layer, "layer": cfg.hidden_size}[stage.recompute]
        again = layer + mlp if stage.recompute or stage.offload else 0
        kept = float((0 if stage.offload else of_layer * passes) + again)
    if phase_of(stage).learn_index:
        kept += 1.5 * cfg.index_n_heads * cfg.index_head_dim * passes
    return kept


def _expands(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> bool:
    """Whether attention runs with expanded keys and values for each head (`PackedView.attend_expanded`)."""
    phase, is_half = phase_of(stage), element_bytes(recipe)[1] == 2
    fits = is_half and max(cfg.qk_head_dim, cfg.v_head_dim) <= MAX_WIDTH and device_of(recipe.device).type == "cuda"
    return fits and phase.keys == "dense" and phase.window is None


def state_bytes(cfg: ModelConfig, recipe: Recipe) -> float:
    """Upper bound of the size of the state file."""
    size, _ = element_bytes(recipe)
    held = max(_trained(cfg, recipe, stage)[1] for stage in recipe.stage)
    return float(size * (count_parameters(cfg).with_mtp + held))


def element_bytes(recipe: Recipe) -> tuple[int, int]:
    """(bytes of an element of the trained weights, bytes of an element in computation)."""
    of = {"bfloat16": 2, "float32": 4}
    return of[recipe.model.dtype], of[recipe.model.compute or recipe.model.dtype]


def _trained(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> tuple[int, int]:
    """(elements of the parameters that the stage trains, elements of their optimizer state)."""
    named = meta_model(cfg, recipe, stage).named_parameters()
    trained = {name: weight.numel() for name, weight in named if weight.requires_grad}
    return sum(trained.values()), sum(n * states_per_element(name, recipe, stage) for name, n in trained.items())


def meta_model(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> Glm5:
    """The model on device meta, with `requires_grad` as in the stage."""
    with torch.device("meta"):
        model = Glm5(cfg)
        if recipe.lora is not None:
            adapt(model, recipe.lora, recipe.seed)
    if recipe.lora is None:
        choose_parameters(model, stage)
    return model


def states_per_element(name: str, recipe: Recipe, stage: StageConfig) -> int:
    """Optimizer state values per element of a parameter: 1 with Muon, 2 with AdamW."""
    return 1 if rule_of(name, stage.optimizer or recipe.optimizer).optimizer == "muon" else 2


def matmul_speed(device: torch.device) -> float:
    """FLOP/s of a product of square matrices, the best of twelve runs."""
    dtype, width = (torch.bfloat16, 4096) if device.type == "cuda" else (torch.float32, 512)
    a = torch.ones(width, width, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(12):
        began = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - began)
    return 2 * width**3 / best


def _advice(recipe: Recipe, stage: StageConfig, parts: dict[str, float], over: float) -> str:
    sequences = stage.pass_sequences or stage.sequences
    if sequences > 1 and parts["activations"] * (1 - 1 / sequences) > over:
        fitting = max(1, int(sequences * (1 - over / parts["activations"])))
        return f"pass_sequences = {fitting} in place of {sequences}"
    if parts["activations"] > over and stage.recompute is None:
        return 'recompute = "layer" in the stage, which keeps a layer\'s input alone'
    if parts["activations"] > over and not stage.offload:
        return "offload = true in the stage, which keeps it in host memory"
    if recipe.model.dtype == "float32":
        return 'model.dtype = "bfloat16", which halves all of it'
    if recipe.optimizer.kind == "adamw":
        return 'optimizer.kind = "muon", which keeps one number a matrix element'
    return "a shorter seq_len, or a smaller model"


def device_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(host_memory.total())


def existing_parent(path: Path) -> Path:
    path = path.resolve()
    return next(each for each in (path, *path.parents) if each.exists())


def format_duration(seconds: float) -> str:
    for size, name in ((86400 * 365, "years"), (86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"
