"""A checkpoint on held-out tasks of every skill, through the engine in its deterministic mode, with drafts.

The measure of a task is its reward, or the metric `true` of an environment whose reward is not what is wanted.

A held-out task has a content that no [[shown]] and no stage of `glm5 rl` has asked, as far as its recipe says which
tasks it asks, and no two have the same. Every stage gets the same tasks, so that stages can be compared task by task.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glm5.common.errors import ConfigError
from glm5.config.post_train import PostTrainRecipe, SkillSection
from glm5.config.rl import EnvironmentSection, RLRecipe
from glm5.config.train import ModelSection
from glm5.engine import AsyncEngine
from glm5.rl.build import PolicyBuilder, threads_of
from glm5.rl.environments.table import make
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.kept_tasks import HELD_OUT
from glm5.rl.rollouts.collect import Draw, cause_of, collect
from glm5.rl.rollouts.engines import Engines
from glm5.rl.rollouts.harness import Harness
from glm5.rl.rollouts.policy import Policy
from glm5.rl.trainer import arithmetic
from glm5.train.stage_trainer import device_of

Measured = dict[str, Any]
"""skills: {environment: rewards}; tokens, seconds, and drafted and accepted drafts by position."""
AT_ONCE = 256
_TRIES = 20
"""Seeds that are looked at for each held-out task."""


def held_out(recipe: PostTrainRecipe, trained: Sequence[RLRecipe]) -> dict[str, list[int]]:
    """Seeds of the held-out tasks of each skill. ConfigError where a skill cannot be measured."""
    return {skill.environment: _held_out(recipe, skill, trained) for skill in recipe.skill}


def _held_out(recipe: PostTrainRecipe, skill: SkillSection, trained: Sequence[RLRecipe]) -> list[int]:
    name, environment = skill.environment, make(skill.environment)
    if environment.num_seats > 1:
        raise ConfigError(f"skill {name}: is self-play, which has no reward of its own; allowed: other environments")
    if skill.level >= environment.levels:
        raise ConfigError(f"skill {name}: level: got {skill.level}; allowed: 0 to {environment.levels - 1}")
    asked = {(one.environment, one.level, one.first_task, one.conversations) for one in recipe.shown}
    for run in trained:
        at_most = run.steps * run.rollouts.groups
        asked |= {(one.name, one.level, one.first_task, one.tasks or at_most) for one in run.environment}
    ranges = [(first, count) for of, level, first, count in asked if (of, level) == (name, skill.level)]
    seeds = {seed for first, count in ranges for seed in range(first, first + count)}
    known, found = {environment.task(seed, skill.level).key for seed in seeds}, list[int]()
    for seed in range(HELD_OUT, HELD_OUT + _TRIES * recipe.evaluation.tasks):
        key = environment.task(seed, skill.level).key
        if key not in known:
            known.add(key)
            found.append(seed)
        if len(found) == recipe.evaluation.tasks:
            break
    if not found:
        raise ConfigError(f"skill {name}: level {skill.level} has no task left that no stage trains on; train on fewer")
    return found


def draws_of(recipe: PostTrainRecipe, seeds: Mapping[str, Sequence[int]]) -> list[Draw]:
    """The tasks of all skills, in order."""
    levels = {one.environment: one.level for one in recipe.skill}
    pairs = [(name, seed) for name, of_skill in seeds.items() for seed in of_skill]
    return [Draw(number, name, seed, levels[name]) for number, (name, seed) in enumerate(pairs)]


def measure(
    recipe: PostTrainRecipe, folder: Path, seeds: Mapping[str, Sequence[int]], *, is_quantized: bool
) -> Measured:
    """The checkpoint in `folder`. On a CPU, floats are computed in float32, which is fastest there. Raises EngineDead,
    TrainingError."""
    like, device = as_run(recipe, folder), device_of(recipe.device)
    dtype = "float32" if device.type == "cpu" and not is_quantized else "auto"
    with arithmetic(like, device):
        engines = Engines(lambda _: _engine(like, folder, device, dtype))
        return asyncio.run(_measured(recipe, PolicyBuilder(like, recipe.folder), engines, seeds))


def as_run(recipe: PostTrainRecipe, folder: Path) -> RLRecipe:
    """A run of `glm5 rl` that would only evaluate."""
    return RLRecipe(
        name="skills",
        device=recipe.device,
        threads=recipe.threads,
        steps=1,
        lr=1.0,
        model=ModelSection(checkpoint=str(folder)),
        rollouts=recipe.evaluation.rollouts,
        environment=tuple(EnvironmentSection(name=one.environment, level=one.level) for one in recipe.skill),
    )


async def _measured(
    recipe: PostTrainRecipe, builder: PolicyBuilder, engines: Engines, seeds: Mapping[str, Sequence[int]]
) -> Measured:
    sandbox = builder.sandbox(unsafe_local=False)
    try:
        await asyncio.to_thread(engines.start)
        async with EnvironmentWorkers(list(seeds), sandbox=sandbox) as workers:
            policy = Policy(engines, recipe.evaluation.rollouts, greedy=recipe.evaluation.greedy)
            began = time.monotonic()
            harness = Harness(policy, workers, builder.chat)
            groups = await collect(harness, draws_of(recipe, seeds), 1, run_seed=0, concurrency=AT_ONCE)
            seconds = time.monotonic() - began
            (stats,) = await engines.stats()
    except ExceptionGroup as error:
        raise cause_of(error) from error
    finally:
        await engines.close()
    rollouts = [group.rollouts[0] for group in groups]
    rewards = [merit(one.reward, one.metrics) if one.is_valid else None for one in rollouts]
    drafts = stats["speculation"]
    return {
        "skills": by_skill(seeds, rewards),
        "tokens": stats["sampled_tokens"],
        "seconds": seconds,
        "drafted": drafts["drafted"],
        "accepted": drafts["accepted"],
    }


def merit(reward: float, metrics: Mapping[str, float]) -> float:
    """Of a finished episode."""
    return metrics.get("true", reward)


def _engine(like: RLRecipe, folder: Path, device: torch.device, dtype: str) -> AsyncEngine:
    cfg = like.rollouts
    return AsyncEngine(
        folder,
        device=str(device),
        dtype=dtype,
        deterministic=True,
        max_model_len=cfg.max_model_len,
        max_num_seqs=AT_ONCE,
        num_speculative_tokens=cfg.num_speculative_tokens,
        adaptive_speculation=False,  # so that what stands of drafts is the MTP layer's merit, not the load's
        num_threads=threads_of(like, device),
    )


def by_skill(seeds: Mapping[str, Sequence[int]], rewards: Sequence[float | None]) -> dict[str, list[float | None]]:
    """The rewards of all tasks in order, apart for each skill."""
    left = iter(rewards)
    return {name: [next(left) for _ in of_skill] for name, of_skill in seeds.items()}
