"""What a recipe needs, without training: parameters, memory and time of each stage, and what to change for less.

    memory    weights + gradients + optimizer state + activations of one pass + logits of a chunk
    time      operations / what the device reached in a product of matrices just now, times the share that models reach

Activations are what the layers keep for the backward pass: per token some multiples of the widths, no scores and no
copies of latents, however long the sequence. Compared with counted peaks in the tests.
"""

import json
import shutil
import time
from pathlib import Path

import torch

from glm5.checkpoint.dense_mla import config_to_train
from glm5.checkpoint.resolve import resolve
from glm5.config.model import ModelConfig
from glm5.config.tensors import count_parameters
from glm5.config.train import Recipe, StageConfig
from glm5.kernels.sequence_attention.flash import MAX_WIDTH
from glm5.model.glm5 import Glm5
from glm5.train.lora import adapt
from glm5.train.metrics import flops_per_token
from glm5.train.optim.table import rule_of
from glm5.train.qat import check_widths
from glm5.train.schedule import Schedule
from glm5.train.stage_trainer import device_of
from glm5.train.stages import choose_parameters, longer, losses_of, phase_of

EFFICIENCY = 0.3
"""Share of a matrix product's speed that training reaches; rough, as small models reach less."""
GIB = 2**30


def estimate(recipe: Recipe) -> str:
    """The text of `--dry-run`. Reads configs and sizes only; data are not opened."""
    section = recipe.model
    of_checkpoint = None if section.checkpoint is None else config_to_train(resolve(section.checkpoint), section.config)
    cfg = section.architecture(of_checkpoint)
    if any(stage.qat is not None for stage in recipe.stage):
        check_widths(cfg)
    count = count_parameters(cfg)
    device = device_of(recipe.device)
    speed, has = matmul_speed(device), room(device)
    lines = [
        f"model: {count.with_mtp:,} parameters, {count.active:,} of them for a token beside embedding and head",
        f"device: {device}, {has / GIB:.1f} GiB, {speed / 1e12:.3g} TFLOP/s in products of matrices",
    ]
    seconds = 0.0
    for stage in recipe.stage:
        parts = memory_parts(cfg, recipe, stage)
        needed = sum(parts.values())
        tokens = (Schedule(stage).draws(stage.steps - 1).stop) * stage.seq_len
        took = flops_per_token(cfg, stage.seq_len, phase_of(stage)) * tokens / (EFFICIENCY * speed)
        seconds += took
        listed = ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items())
        lines.append(
            f"stage {stage.name} ({stage.kind}): {stage.steps:,} steps, {tokens:,} tokens, about {long(took)}; "
            f"about {needed / GIB:.3g} GiB ({listed})"
        )
        if needed > has:
            lines.append(f"  does not fit: {_advice(recipe, stage, parts, needed - has)}")
    lines += longer(recipe, cfg)
    total = seconds
    state = state_bytes(cfg, recipe)
    free = shutil.disk_usage(existing(recipe.folder)).free
    lines.append(
        f"in all about {long(total)}; {recipe.folder}: {state / GIB:.3g} GiB for the state, {free / GIB:.3g} free"
    )
    return "\n".join([*lines, resolved(recipe)])


def resolved(recipe: Recipe) -> str:
    return "recipe:\n" + json.dumps(json.loads(recipe.model_dump_json()), indent=2)


def memory_parts(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> dict[str, float]:
    """Bytes by what they are for, at the peak of a step."""
    size, computed = element_bytes(recipe)
    trained, held = _trained(cfg, recipe, stage)
    tokens = (stage.pass_sequences or stage.sequences) * stage.seq_len
    losses = losses_of(recipe, stage, 0)
    passes = cfg.num_hidden_layers + (losses.mtp_depth if cfg.num_nextn_predict_layers else 0)
    return {
        "weights": (size + (computed if computed != size else 0)) * count_parameters(cfg).with_mtp,
        "gradients": size * trained,
        "optimizer": float(size * held),
        "activations": computed * tokens * kept_numbers(cfg, recipe, stage, passes),
        "logits": logit_bytes(cfg, min(losses.chunk, tokens)),
    }


def logit_bytes(cfg: ModelConfig, num_tokens: int) -> float:
    """Of so many at a time, with their gradients."""
    return float(3 * 4 * num_tokens * cfg.vocab_size)


def kept_numbers(cfg: ModelConfig, recipe: Recipe, stage: StageConfig, passes: float, *, whole: bool = True) -> float:
    """How many numbers `passes` layers keep of a token for the backward pass. `whole`: of whole sequences."""
    # Of a head: a query, key, value and output; or queries before and after absorption, and outputs likewise.
    latents = 2 * (cfg.kv_lora_rank + cfg.qk_rope_head_dim)
    more = cfg.v_head_dim if whole and _expands(cfg, recipe, stage) else latents
    layer = 8 * cfg.hidden_size + cfg.num_attention_heads * (2 * cfg.qk_head_dim + cfg.v_head_dim + more)
    mlp = 3 * cfg.moe_intermediate_size * (cfg.num_experts_per_tok + cfg.n_shared_experts)
    # In warm-up nothing of the trunk is kept for a backward pass: one layer's tensors exist at a time.
    kept = float(layer + mlp)
    if stage.kind != "warmup":
        of_layer = {None: layer + mlp, "mlp": layer, "layer": cfg.hidden_size}[stage.recompute]
        again = layer + mlp if stage.recompute or stage.offload else 0
        kept = float((0 if stage.offload else of_layer * passes) + again)
    if phase_of(stage).learn_index:
        kept += 1.5 * cfg.index_n_heads * cfg.index_head_dim * passes
    return kept


def _expands(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> bool:
    """Whether heads have keys and values of their own, and queries are not absorbed (`PackedView.attend_expanded`)."""
    phase, is_half = phase_of(stage), element_bytes(recipe)[1] == 2
    fits = is_half and max(cfg.qk_head_dim, cfg.v_head_dim) <= MAX_WIDTH and device_of(recipe.device).type == "cuda"
    return fits and phase.keys == "dense" and phase.window is None


def state_bytes(cfg: ModelConfig, recipe: Recipe) -> float:
    """Size of the state file at most."""
    size, _ = element_bytes(recipe)
    held = max(_trained(cfg, recipe, stage)[1] for stage in recipe.stage)
    return float(size * (count_parameters(cfg).with_mtp + held))


def element_bytes(recipe: Recipe) -> tuple[int, int]:
    """Of a weight that optimizers add to, and of what the model computes in."""
    of = {"bfloat16": 2, "float32": 4}
    return of[recipe.model.dtype], of[recipe.model.compute or recipe.model.dtype]


def _trained(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> tuple[int, int]:
    """Numbers of elements: of parameters that the stage trains, and of what the optimizer keeps of them, one for
    Muon's and two for AdamW's."""
    named = outlined(cfg, recipe, stage).named_parameters()
    trained = {name: weight.numel() for name, weight in named if weight.requires_grad}
    return sum(trained.values()), sum(n * states_of(name, recipe, stage) for name, n in trained.items())


def outlined(cfg: ModelConfig, recipe: Recipe, stage: StageConfig) -> Glm5:
    """The model without content, which knows what the stage trains."""
    with torch.device("meta"):
        model = Glm5(cfg)
        if recipe.lora is not None:
            adapt(model, recipe.lora, recipe.seed)
    if recipe.lora is None:
        choose_parameters(model, stage)
    return model


def states_of(name: str, recipe: Recipe, stage: StageConfig) -> int:
    """Numbers that the optimizer keeps of an element of a parameter."""
    return 1 if rule_of(name, stage.optimizer or recipe.optimizer).optimizer == "muon" else 2


def matmul_speed(device: torch.device) -> float:
    """Operations a second in a product of square matrices, the best of twelve."""
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


def room(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return 1024.0 * int(line.split()[1])
    return float("inf")


def existing(path: Path) -> Path:
    path = path.resolve()
    return next(each for each in (path, *path.parents) if each.exists())


def long(seconds: float) -> str:
    for size, name in ((86400 * 365, "years"), (86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"
