"""Estimates what a recipe of reinforcement learning needs: parameters, memory and time.

    trainer   weights + gradients + optimizer state + activations of one pass + logits of a chunk + the process itself
    engine    weights + KV cache + the process itself
    time      of a run's own steps, once two were measured; before, FLOPs / (speed of a matrix product * EFFICIENCY)

The trainer's peak is the measured one, too, where there is one. Before, every conversation is taken to be as long as
`max_model_len` allows: a bound from above.
"""

import resource
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from glm5.checkpoint.dense_mla import config_to_train
from glm5.checkpoint.resolve import resolve
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.rl import RLRecipe
from glm5.config.tensors import count_parameters
from glm5.config.train import Recipe, StageConfig
from glm5.engine.cache.kv_cache import KVCache
from glm5.model.glm5 import Glm5
from glm5.rl.algorithms.table import preset_of
from glm5.rl.build import check_teachers, environments_of, num_pages, num_rollouts, num_teacher_pages
from glm5.rl.predict import Profile, advice, bound, measured_profile
from glm5.rl.tasks import TaskSource
from glm5.rl.training.critic import is_learning
from glm5.rl.training.policy import SPARSE, choose_parameters
from glm5.rl.watch import read_metrics
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
    recipe_json,
    states_per_element,
)
from glm5.train.metrics import flops_per_token
from glm5.train.stage_trainer import device_of

CHUNK = 4096  # tokens whose logits exist at a time
TOO_LARGE = "  does not fit: a smaller pass_tokens, rollouts.concurrency or rollouts.max_model_len needs less"
Metrics = list[dict[str, Any]]
"""The lines of the run in the recipe's folder."""


def estimate(recipe: RLRecipe) -> str:
    """The text of `--dry-run`. Raises ConfigError for what a run would refuse before its first step."""
    TaskSource(recipe, environments_of(recipe))
    check_teachers(recipe)
    _check_reward(recipe)
    preset_of(recipe.algorithm.name, recipe.algorithm.parameters)
    cfg, device = model_config(recipe.model), device_of(recipe.device)
    count, available = count_parameters(cfg), device_memory(device)
    places = [torch.device(one) for one in recipe.rollouts.devices] or [device]
    trainer, engines = trainer_parts(cfg, recipe), [engine_parts(cfg, recipe, len(places), place) for place in places]
    metrics = read_metrics(recipe.folder)
    seconds, source = step_seconds(cfg, recipe, metrics)
    peak = max((line.get("perf/peak_gib", 0.0) for line in metrics), default=0.0) * GIB
    needed = defaultdict[torch.device, float](float, {_numbered(device): peak or sum(trainer.values())})
    teachers = [teacher_parts(recipe, number, places) for number in range(len(recipe.teacher))]
    for place, engine in zip(places, engines, strict=True):
        needed[_numbered(place)] += sum(engine.values())
    for number, teacher in enumerate(teachers):
        needed[_numbered(places[number % len(places)])] += sum(teacher.values())
    state = sum(trainer[name] for name in ("weights", "optimizer"))
    free = shutil.disk_usage(existing_parent(recipe.folder)).free
    lines = [
        f"model: {count.with_mtp:,} parameters, {count.active:,} of them for a token beside embedding and head",
        f"device: {device}, {available / GIB:.1f} GiB",
        f"a step: {max_tokens(recipe):,} tokens at most, in {num_rollouts(recipe):,} conversations at a time",
        f"memory: about {sum(needed.values()) / GIB:.3g} GiB",
        f"  trainer: {_listed(trainer)}" + (f"; measured {peak / GIB:.3g}" if peak else ""),
        f"  engine{f', each of {len(engines)}' if len(engines) > 1 else ''}: {_listed(engines[0])}",
        *(f"  teacher {one.name}: {_listed(parts)}" for one, parts in zip(recipe.teacher, teachers, strict=True)),
    ]
    fits = True
    for place, size in needed.items():
        if _is_here(place):
            fits &= size <= device_memory(place)
            lines += [f"  {place}: {size / GIB:.3g} of {device_memory(place) / GIB:.1f}"] if len(needed) > 1 else []
        else:
            lines.append(f"  {place}: {size / GIB:.3g}; this machine has no such device, a run needs one that has")
    if not fits:
        lines.append(TOO_LARGE)
    lines += [
        f"time: about {format_duration(seconds * recipe.steps)}, {seconds:.3g} s a step ({source})",
        *(() if recipe.asynchronous is None else advice(recipe, profile_of(cfg, recipe, metrics))),
        f"{recipe.folder}: a state {state / GIB:.3g} GiB, records {recipe.records.max_gb:g}; {free / GIB:.3g} free",
        recipe_json(recipe),
    ]
    return "\n".join(lines)


def needs(cfg: ModelConfig, recipe: RLRecipe) -> tuple[float, float]:
    """Bytes at the peak of trainer and engines together, and seconds of all steps. Teachers are taken to have the
    policy's config."""
    places = [torch.device(one) for one in recipe.rollouts.devices] or [device_of(recipe.device)]
    parts = [engine_parts(cfg, recipe, len(places), place) for place in places]
    parts += [teacher_parts(recipe, number, places, cfg) for number in range(len(recipe.teacher))]
    seconds, _ = step_seconds(cfg, recipe, read_metrics(recipe.folder))
    return sum(sum(each.values()) for each in (trainer_parts(cfg, recipe), *parts)), seconds * recipe.steps


def trainer_parts(cfg: ModelConfig, recipe: RLRecipe) -> dict[str, float]:
    """Bytes at the peak of a step in the process of `glm5 rl`, by purpose."""
    # What the functions of supervised training read of its recipes. An exact pass keeps the inputs of layers alone.
    like = Recipe.model_construct(model=recipe.model, device=recipe.device, optimizer=recipe.optimizer)
    kept = "layer" if recipe.exact else None
    stage = StageConfig.model_construct(kind="sparse", recompute=kept, optimizer=None, window=None, keys=None)
    size, computed = element_bytes(like)
    with torch.device("meta"):
        model = Glm5(cfg)
    choose_parameters(model)
    trained = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
    if has_critic := preset_of(recipe.algorithm.name).advantages is None:
        trained |= {f"critic.{name}": number for name, number in trained.items() if is_learning(name)}
    held = sum(states_per_element(name, like, stage) * number for name, number in trained.items())
    tokens = min(recipe.pass_tokens, max_tokens(recipe))
    copies = 1 + bool(recipe.algorithm.reference_kl) + has_critic
    count = count_parameters(cfg).with_mtp
    return {
        "weights": float((size * copies + (computed if computed != size else 0)) * count),
        "gradients": float(size * sum(trained.values())),
        "optimizer": float(size * held),
        "activations": computed * tokens * kept_values(cfg, like, stage, cfg.num_hidden_layers),
        "logits": logit_bytes(cfg, min(CHUNK, tokens)),
        "process": process_bytes(device_of(recipe.device)),
        **reward_models(recipe, float(size * count)),
    }


def _check_reward(recipe: RLRecipe) -> None:
    """ConfigError for a file of `[reward]` that is not there, CheckpointError for a folder."""
    reward = recipe.reward
    if reward is None:
        return
    for folder in reward.folders:
        if not (resolve(folder) / "reward.json").is_file():
            raise ConfigError(
                f"{folder} is no reward model: it has no reward.json, which a stage of kind reward writes"
            )
    if reward.anchors and not Path(reward.anchors.file).is_file():
        raise ConfigError(f"reward.anchors: there is no file {Path(reward.anchors.file).absolute()}")


def reward_models(recipe: RLRecipe, unseen: float) -> dict[str, float]:
    """Bytes of the weights of outcome reward models, which stand on the trainer's device; nothing without any.
    `unseen`: of one that is not there yet."""
    folders = [] if recipe.reward is None else recipe.reward.folders
    sizes = [sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) or unseen for folder in folders]
    return {"reward models": float(sum(sizes))} if sizes else {}


def engine_parts(cfg: ModelConfig, recipe: RLRecipe, num_engines: int, device: torch.device) -> dict[str, float]:
    """Bytes of the process of one of so many engines, by purpose."""
    computed = getattr(torch, recipe.model.compute or recipe.model.dtype)
    has_drafts = recipe.rollouts.num_speculative_tokens > 0
    cache = num_pages(recipe, num_engines) * KVCache.bytes_per_page(cfg, computed, mtp=has_drafts)
    given = recipe.rollouts.kv_cache_gb
    return {
        "weights": float(computed.itemsize * count_parameters(cfg).with_mtp),
        "cache": float(cache) if given is None else given * GIB,
        "process": process_bytes(device),
    }


def teacher_parts(
    recipe: RLRecipe, number: int, places: Sequence[torch.device], cfg: ModelConfig | None = None
) -> dict[str, float]:
    """Bytes of the process of a teacher at the peak of a step. On a GPU two at most have weights there and one a cache:
    those that come first. `cfg`: its config, by default its checkpoint's."""
    teacher, device = recipe.teacher[number], places[number % len(places)]
    cfg = cfg or config_to_train(resolve(teacher.checkpoint), {})
    before = number // len(places) if device.type == "cuda" else 0
    weights = float(getattr(torch, cfg.dtype).itemsize * count_parameters(cfg).with_mtp)
    cache = float(num_teacher_pages(recipe) * KVCache.bytes_per_page(cfg, getattr(torch, cfg.dtype), mtp=False))
    return {
        "weights": weights if before < 2 else 0.0,
        "cache": cache if before < 1 else 0.0,
        "process": process_bytes(device),
    }


def process_bytes(device: torch.device) -> float:
    """What a process takes on the device by itself: on a CPU as much as this one, once it has loaded an optimizer."""
    if device.type == "cuda":
        return 0.0
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    return float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def step_seconds(cfg: ModelConfig, recipe: RLRecipe, metrics: Metrics) -> tuple[float, str]:
    """Seconds of a step, and where the number comes from."""
    measured = [line["time/step"] for line in metrics if "time/step" in line]
    if len(measured) >= 2:
        return median(measured[-100:]), f"the median of {len(measured[-100:])} that were measured"
    sampling, training = token_seconds(cfg, recipe)
    # Teachers and reward models read what was sampled.
    readers = bool(recipe.teacher) + (0 if recipe.reward is None else len(recipe.reward.folders))
    seconds = sampling * (1 + readers) + training
    return seconds * max_tokens(recipe), "at most, by the speed of matrix products"


def token_seconds(cfg: ModelConfig, recipe: RLRecipe) -> tuple[float, float]:
    """Seconds of a token in sampling and in training, by the speed of matrix products."""
    # A rollout is a forward pass, training one with twice that backward, an exact pass a further forward.
    flops = flops_per_token(cfg, recipe.rollouts.max_model_len, SPARSE) / 3
    forward = flops / (EFFICIENCY * matmul_speed(device_of(recipe.device)))
    return forward, forward * (4 if recipe.exact else 3)


def profile_of(cfg: ModelConfig, recipe: RLRecipe, metrics: Metrics) -> Profile:
    """What a prediction goes by: an earlier run, else the recipe's limits."""
    if (found := measured_profile(recipe, metrics)) is not None:
        return found
    sampling, training = token_seconds(cfg, recipe)
    return bound(recipe, sampling, training * max_tokens(recipe))


def max_tokens(recipe: RLRecipe) -> int:
    """Tokens of a step's conversations."""
    return recipe.rollouts.groups * recipe.rollouts.group_size * recipe.rollouts.max_model_len


def _numbered(device: torch.device) -> torch.device:
    """With its number: "cuda" is the first one."""
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _is_here(device: torch.device) -> bool:
    return device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()


def _listed(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.3g}" for name, size in parts.items())
