"""The two sides of `glm5 bench rl`: what each is tuned by, and the job that both programs get.

Both train on the same tasks in the same order, from one checkpoint in float32, with one optimizer step for each batch
of rollouts. TRL's loss_type "grpo" is then the same function as this package's algorithm `grpo`: the mean over rollouts
of the mean over a rollout's tokens of -A log pi, A = (R - mean) / (std + eps) over a group, the ratio being 1. What is
left: eps is 1e-4 there and 1e-6 here, and samples differ, as random numbers do.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from glm5.bench.rl import trl_run
from glm5.common.cores import usable_cores
from glm5.common.errors import ConfigError, GlmError
from glm5.config.rl import RLRecipe
from glm5.config.train import ModelSection
from glm5.rl.build import PolicyBuilder, environments_of
from glm5.rl.environments.protocol import with_system
from glm5.rl.tasks import TaskSource

Choice = Mapping[str, Any]
NEEDED: dict[str, Any] = {
    "algorithm.name": "grpo",
    "algorithm.entropy": 0.0,
    "algorithm.final_entropy": None,
    "algorithm.reference_kl": 0.0,
    "algorithm.steps_per_batch": 1,
    "optimizer.kind": "adamw",
    "optimizer.weight_decay": 0.0,
    "lr_warmup_steps": 0,
    "final_lr": None,
    "rollouts.top_k": 0,
    "model.dtype": "float32",
}
"""What a recipe must say: TRL has not the rest, or has it otherwise."""


@dataclass(frozen=True)
class Side:
    """One library. `choices`: what it is tuned by, the starting values first. The last word of `command` is the file of
    a job; the run writes metrics.jsonl into the recipe's folder."""

    name: str
    command: list[str]
    choices: Mapping[str, list[Any]]


def ours(recipe: RLRecipe) -> Side:
    """`glm5 rl`, with or without equal log-probabilities of engine and trainer."""
    command = [sys.executable, "-m", "glm5.bench.rl.ours"]
    return Side("glm5", command, {"exact": [True, False], "threads": _threads(recipe)})


def trl(recipe: RLRecipe, python: str, environment: Mapping[str, str]) -> Side:
    """TRL's GRPOTrainer, in the interpreter `python`. Raises ConfigError for a recipe that TRL would not train in the
    same way, and GlmError where that interpreter has no TRL."""
    for key, allowed in NEEDED.items():
        if (got := reduce(getattr, key.split("."), recipe)) != allowed:
            raise ConfigError(f"--against trl: {key}: got {got}; allowed: {allowed}, which both sides have alike")
    turns = [one.num_turns for one in environments_of(recipe).values()]
    if turns != [1] or recipe.environment[0].ladder is not None:
        raise ConfigError(f"--against trl: needs one environment of one turn, without a ladder; got turns {turns}")
    command = [python, "-P", "-c", "from importlib.metadata import version; print(version('trl'))"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(environment), check=True)
    except (OSError, subprocess.SubprocessError):
        raise GlmError(
            f"{python} is no Python with TRL: run  {python} -m pip install 'trl>=1.16' 'transformers>=5.23'  or name "
            "another interpreter with --peer-python"
        ) from None
    batch = recipe.rollouts.groups * recipe.rollouts.group_size
    micro = [batch // parts for parts in (1, 2, 4) if batch % parts == 0]
    choices = {"backend": list(trl_run.BACKENDS), "threads": _threads(recipe), "micro_batch": micro}
    # -P: the program's own folder is not searched for modules.
    return Side(f"TRL {found.stdout.strip()}", [python, "-P", trl_run.__file__], choices)


def job(recipe: RLRecipe, checkpoint: Path, folder: Path, steps: int, seed: int, choice: Choice) -> dict[str, Any]:
    """What a run is told, as JSON: the recipe from `checkpoint` on, without its warm start; for TRL also its tasks and
    the tokens of the first prompt."""
    exact = choice.get("exact", recipe.exact)
    update = {
        "model": ModelSection(checkpoint=str(checkpoint), dtype=recipe.model.dtype, compute=recipe.model.compute),
        "rollouts": recipe.rollouts.model_copy(update={"deterministic": exact}),
        "records": recipe.records.model_copy(update={"every": 0, "state_every": steps}),
        "evaluation": recipe.evaluation.model_copy(update={"every": steps}),
    }
    flat = {"out": str(folder), "steps": steps, "seed": seed, "threads": choice["threads"], "exact": exact}
    changed = recipe.model_copy(update=update | flat | {"warm_start": None})
    builder = PolicyBuilder(changed, folder)
    source = TaskSource(changed, builder.environments)
    draws = [draw for step in range(steps) for draw in source.draws(step)]
    first = builder.environments[draws[0].environment].task(draws[0].seed, draws[0].level)
    return {
        "recipe": json.loads(changed.model_dump_json()),
        "choice": dict(choice),
        "package": str(Path(__file__).parents[3]),
        "tasks": [[draw.seed, draw.level] for draw in draws],
        "first_prompt": builder.chat.prompt(with_system(changed.rollouts.system, first.messages)),
    }


def _threads(recipe: RLRecipe) -> list[int]:
    return sorted({1, usable_cores()}) if recipe.threads is None else [recipe.threads]
