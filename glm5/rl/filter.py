"""`glm5 rl filter`: which tasks of a recipe its policy solves at a rate within a range, and a stronger model solves.

    OUT/measured.jsonl   tasks with their pass rates, added as they are measured: the same command goes on from there
    OUT/tasks.jsonl      the kept ones, for `tasks_file` of a recipe (kept_tasks.py)
    OUT/policy           the checkpoint that was sampled, where the recipe begins with none or changes it

A pass rate is the share of solutions among valid rollouts (evaluate.py). A task of which half the rollouts or fewer are
valid has none, and is tried again by the same command.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from glm5.checkpoint.save import save
from glm5.common.errors import ConfigError, TrainingError
from glm5.common.progress import Progress
from glm5.config.rl import RLRecipe
from glm5.config.rl_filter import RLFilterConfig
from glm5.config.train import ModelSection
from glm5.rl.build import PolicyBuilder, num_rollouts
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.evaluate import solved
from glm5.rl.kept_tasks import RatedTask, read_tasks, write_tasks
from glm5.rl.rollout import Group
from glm5.rl.rollouts.collect import Draw, cause_of, collect
from glm5.rl.rollouts.harness import Harness
from glm5.rl.rollouts.policy import Policy
from glm5.rl.trainer import PolicyTrainer, arithmetic
from glm5.train.stage_trainer import device_of
from glm5.train.state import first_difference, locked, writing_to

MEANS = {"seed", "model", "optimizer", "warm_start", "rollouts", "environment"}
"""Keys of a recipe that pass rates depend on."""
LIMITS = {"min_pass_rate", "max_pass_rate", "stronger_min_pass_rate", "keep"}
VERDICTS = ("not measured", "too hard", "too easy", "not by the stronger", "beyond --keep", "kept")
_SEEDS = 2**33  # from the recipe's seed: other replies than in training and evaluation


def filter_tasks(recipe: RLRecipe, settings: RLFilterConfig) -> str:
    """Measure what is not measured yet, and write the kept tasks; returns a table by environment and level. What was
    measured when Ctrl-C ends it is on disk."""
    out, device = Path(settings.out or f"{recipe.folder}-filter"), device_of(recipe.device)
    recipe = recipe if settings.policy is None else _begun_with(recipe, settings.policy)
    with locked(out), arithmetic(recipe, device):
        builder = PolicyBuilder(recipe, out)
        rates = Rates(out, recipe, settings, candidates(builder, settings.tasks))
        for column, checkpoint in [("pass_rate", None), ("stronger_pass_rate", settings.stronger)]:
            if rates.missing(column):  # no model is loaded for nothing
                of_model = builder if checkpoint is None else PolicyBuilder(_begun_with(recipe, checkpoint), out)
                asyncio.run(_sample(of_model, device, rates, column))
        rates.write()
    return f"{rates.table()}\nkept: {rates.file}"


def candidates(builder: PolicyBuilder, count: int) -> list[RatedTask]:
    """The first `count` tasks of each environment, and of each level that its ladder may reach, without repeated ones.
    More of them begin with the same ones."""
    if alone := [name for name, one in builder.environments.items() if one.num_seats > 1]:
        raise ConfigError(f"environment {alone[0]}: is self-play, in which no task is solved; leave it out with --set")
    found: dict[tuple[str, str], RatedTask] = {}
    for place in range(count):
        for name, section in builder.tasks.sections.items():
            for rung in section.rungs:
                seed, level = section.at(place, rung)
                key = builder.environments[name].task(seed, level).key
                found.setdefault((name, key), RatedTask(environment=name, seed=seed, level=level, key=key))
    return list(found.values())


class Rates:
    """The candidates with what is known of them, kept in OUT/measured.jsonl. TrainingError where that is of another
    recipe."""

    def __init__(self, out: Path, recipe: RLRecipe, settings: RLFilterConfig, tasks: Sequence[RatedTask]) -> None:
        self.settings, self.file, self._journal = settings, out / "tasks.jsonl", out / "measured.jsonl"
        asked = json.loads(recipe.model_dump_json(include=MEANS))
        self.header: dict[str, Any] = {"samples": settings.samples, "recipe": asked}
        old, known = read_tasks(self._journal, is_journal=True) if self._journal.exists() else ({}, [])
        self.header["stronger"] = settings.stronger or old.get("stronger")
        was = {name: old.get(name) or value for name, value in self.header.items()}
        if difference := first_difference(was, self.header):
            raise TrainingError(f"{out} has other pass rates: {difference}; choose another folder with --out")
        with writing_to(self._journal):
            write_tasks(self._journal, known, self.header)
        self._tasks = {(one.environment, one.key): one for one in tasks}
        self._tasks |= {(one.environment, one.key): one for one in known if (one.environment, one.key) in self._tasks}

    def add(self, task: RatedTask) -> None:
        """A task with another pass rate than before."""
        self._tasks[task.environment, task.key] = task
        with writing_to(self._journal), self._journal.open("a", encoding="utf-8") as handle:
            handle.write(task.model_dump_json() + "\n")

    def verdict(self, task: RatedTask) -> str:
        """One of VERDICTS."""
        cfg, rate = self.settings, task.pass_rate
        if rate is None:
            return "not measured"
        if not cfg.min_pass_rate <= rate <= cfg.max_pass_rate:
            return "too hard" if rate < cfg.min_pass_rate else "too easy"
        best = 1.0 if cfg.stronger is None else task.stronger_pass_rate
        if best is None:
            return "not measured"
        return "kept" if best >= cfg.stronger_min_pass_rate else "not by the stronger"

    def missing(self, column: str) -> dict[int, RatedTask]:
        """By their number, the tasks whose verdict needs that pass rate."""
        full = self.full()
        return {
            number: task
            for number, task in enumerate(self._tasks.values())
            if self.verdict(task) == "not measured"
            and (task.pass_rate is None) == (column == "pass_rate")
            and task.environment not in full
        }

    def kept(self) -> list[RatedTask]:
        """In order, and of each environment no more than asked."""
        found: dict[str, list[RatedTask]] = defaultdict(list)
        for task in self._tasks.values():
            if self.verdict(task) == "kept":
                found[task.environment].append(task)
        return [task for of_environment in found.values() for task in of_environment[: self.settings.keep]]

    def full(self) -> set[str]:
        """The environments of which no more tasks are to be measured."""
        num_kept = Counter(task.environment for task in self.kept())
        return {name for name, number in num_kept.items() if number == self.settings.keep}

    def write(self) -> None:
        """Write the kept tasks."""
        kept = self.kept()
        with writing_to(self.file):
            write_tasks(self.file, kept, self.header | self.settings.model_dump(include=LIMITS))

    def table(self) -> str:
        """A line for each environment and level: numbers of tasks by verdict, and the mean pass rate."""
        found: dict[tuple[str, int], list[RatedTask]] = defaultdict(list)
        for task in self._tasks.values():
            found[task.environment, task.level].append(task)
        kept = set(self.kept())
        rows: list[tuple[str, ...]] = [("environment", "level", "tasks", "pass rate", *VERDICTS)]
        for (name, level), tasks in sorted(found.items()):
            known = [task.pass_rate for task in tasks if task.pass_rate is not None]
            counts = Counter(map(self.verdict, tasks))
            counts["beyond --keep"] = counts["kept"] - sum(task in kept for task in tasks)
            counts["kept"] -= counts["beyond --keep"]
            mean = f"{sum(known) / max(1, len(known)):.3f}"
            rows.append((name, str(level), str(len(tasks)), mean, *(str(counts[verdict]) for verdict in VERDICTS)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


async def _sample(builder: PolicyBuilder, device: torch.device, rates: Rates, column: str) -> None:
    """Measure with the builder's policy."""
    recipe, sandbox = builder.recipe, builder.sandbox(unsafe_local=rates.settings.unsafe_local)
    engines = await asyncio.to_thread(builder.engines, _checkpoint(builder, device), device, None)
    workers = EnvironmentWorkers(list(builder.environments), num_workers=recipe.workers, sandbox=sandbox)
    try:
        await asyncio.to_thread(engines.start)
        async with workers:
            await measure(Harness(Policy(engines, recipe.rollouts), workers, builder.chat), recipe, rates, column)
    except ExceptionGroup as error:
        raise cause_of(error) from error
    finally:
        await engines.close()


async def measure(harness: Harness, recipe: RLRecipe, rates: Rates, column: str) -> None:
    """Play the tasks that lack this pass rate. Raises groups of EngineDead or TrainingError."""
    tasks, samples = rates.missing(column), rates.settings.samples
    draws = [Draw(number, one.environment, one.seed, one.level) for number, one in tasks.items()]
    at_a_time = rates.settings.keep or max(1, len(draws))

    def add(group: Group) -> None:
        num_solved, num_valid = solved(group)
        if 2 * num_valid > len(group.rollouts):
            rates.add(tasks[group.number].model_copy(update={column: num_solved / num_valid}))
        group.rollouts = ()  # all groups are held until the last one ends
        progress.update(1)

    with Progress(len(draws), "task", column.replace("_", " ")) as progress:
        seed, at_once = recipe.seed + _SEEDS, num_rollouts(recipe)
        for first in range(0, len(draws), at_a_time):
            full = rates.full()
            part = [draw for draw in draws[first : first + at_a_time] if draw.environment not in full]
            await collect(harness, part, samples, run_seed=seed, concurrency=at_once, on_group=add)


def _checkpoint(builder: PolicyBuilder, device: torch.device) -> Path:
    """The folder of what a run would begin with."""
    recipe, folder = builder.recipe, builder.out / "policy"
    if recipe.warm_start is None and recipe.model.checkpoint and not (recipe.model.tokenizer or recipe.model.config):
        return builder.assets
    if not folder.exists():
        trainer = PolicyTrainer(recipe, builder, device)
        trainer.warm_up()
        with writing_to(folder):
            save(trainer.model, folder, assets=builder.assets)
    return folder


def _begun_with(recipe: RLRecipe, checkpoint: str) -> RLRecipe:
    """The recipe with another policy."""
    return recipe.model_copy(update={"model": ModelSection(checkpoint=checkpoint), "warm_start": None})
