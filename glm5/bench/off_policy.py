"""`glm5 bench off-policy`: algorithms on rollouts of weights that are a fixed number of pushes old.

Rollouts and trainer take turns, so nothing depends on time: rollouts of step n have the weights of push
n / push_every - staleness, or the first ones. Of each cell, RATES are tried with seed 0, and the best runs with SEEDS.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, stdev
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm5.common.atomic import atomic_write
from glm5.common.errors import ConfigError, GlmError
from glm5.common.progress import Progress
from glm5.config.bench_off_policy import BenchOffPolicyConfig
from glm5.config.rl import RLRecipe, read_rl_recipe
from glm5.rl.loop import Run
from glm5.rl.trainer import PolicyTrainer, arithmetic
from glm5.rl.watch import FILE, read_lines
from glm5.train.state import locked

RATES, SEEDS, STALENESS = (0.3, 0.6, 1.0), (1, 2, 3, 4, 5), (0, 2, 8)
"""Rates are relative to the recipe's, staleness is in pushes."""
CALIBRATION_STEPS = 4
_DIS, _SINGLE = "dis algorithm.parameters.eps_low={} algorithm.parameters.eps_high={}", "rollouts.group_size=1"
ALGORITHMS = {
    "none": "reinforce",
    "grpo": "grpo",
    "tis": "tis",
    "flash-reinforce": f"flash-reinforce {_SINGLE}",
    **{f"dis ({low}, {high})": _DIS.format(low, high) for low, high in ((0.2, 0.28), (0.8, 3.0), (0.3, 5.0))},
    "sao": f"sao algorithm.critic.lr=1.0 algorithm.critic.warmup_steps=5 {_SINGLE}",
}
_PUSHES = ((1, True), (4, False), (4, True), (8, False), (8, True))
ROWS = [*((name, 1, False) for name in ALGORITHMS), *(("dis (0.3, 5.0)", *more) for more in _PUSHES)]
"""Algorithm, updates a push, and whether a push resets the optimizer."""


class Job(NamedTuple):
    """`row`: the place in ROWS."""

    row: int
    staleness: int
    rate: float
    seed: int

    def recipe(self, settings: BenchOffPolicyConfig) -> RLRecipe:
        plain, (name, push_every, resets) = read_rl_recipe(settings.recipe, settings.set), ROWS[self.row]
        own = [f"algorithm.name={ALGORITHMS[name]}", f"seed={self.seed}", f"lr={plain.lr * self.rate}"]
        own += [
            f"asynchronous.{key}={of}" for key, of in (("push_every", push_every), ("max_staleness", self.staleness))
        ]
        own += [f"reset_optimizer={str(resets).lower()}", f"out={settings.out}/{'-'.join(map(str, self))}"]
        if _SINGLE in ALGORITHMS[name]:
            own.append(f"rollouts.groups={plain.rollouts.groups * plain.rollouts.group_size}")
        return read_rl_recipe(settings.recipe, (*settings.set, *" ".join(own).split()))


class LaggedRun(Run):
    """A run of a recipe with `[asynchronous]`, of which the pushes and the staleness count. Held-out tasks at the end
    are played by the last weights."""

    def __init__(self, recipe: RLRecipe) -> None:
        super().__init__(recipe, recipe.folder, torch.device("cpu"), unsafe_local=False, open_gateway=None)
        self.rollouts, self._pushed = None, dict[int, dict[str, Tensor]]()

    def _trainer(self) -> PolicyTrainer:
        return PolicyTrainer(self.recipe, self.builder, self.device)

    def _due(self) -> tuple[int, Mapping[str, Tensor]]:
        version, weights = self.recipe.version_at(self.number), self.trainer.weights()
        assert isinstance(weights, Mapping), "the trainer is in this process"
        if self.number == self.recipe.steps:
            return self.number, weights
        assert self.recipe.asynchronous is not None, "it says how old"
        if version not in self._pushed:
            self._pushed[version] = {name: weight.clone() for name, weight in weights.items()}
        due = max(0, version - self.recipe.asynchronous.max_staleness)
        self._pushed = {number: one for number, one in self._pushed.items() if number >= due}
        return due, self._pushed[due]


def play(job: Job, settings: BenchOffPolicyConfig) -> dict[str, Any]:
    """The line of a job in runs.jsonl. A run that fails, as by a loss that is not finite, has reward 0."""
    recipe, began, error = job.recipe(settings), monotonic(), ""
    shutil.rmtree(recipe.folder, ignore_errors=True)
    recipe.folder.mkdir(parents=True)
    with (recipe.folder / "log.txt").open("w", encoding="utf-8") as log, redirect_stderr(log):
        try:
            with arithmetic(recipe, torch.device("cpu")):
                asyncio.run(LaggedRun(recipe).run())
        except GlmError as failure:
            error = str(failure)
    lines = read_lines(recipe.folder / FILE)
    steps = [line for line in lines if "time/step" in line]
    means = {key: fmean(line[key] for line in steps or [{key: 0.0}]) for key in ("is/mask_frac", "time/step")}
    means["staleness/mean"] = steps[-1]["staleness/mean"] if steps else 0.0
    reward, curve = 0.0 if error else lines[-1]["eval/mean"], [round(line["reward/mean"], 3) for line in steps]
    shutil.rmtree(recipe.folder)
    found = {"step": len(steps), "job": job, "reward": reward, "error": error, "curve": curve}
    return found | means | {"seconds": monotonic() - began}


def measure(settings: BenchOffPolicyConfig, say: Callable[[str], None]) -> str:
    """Run what is missing; returns the table as Markdown. Raises ConfigError, and TrainingError where OUT is in use."""
    file, plain = Path(settings.out, "runs.jsonl"), read_rl_recipe(settings.recipe, settings.set)
    rows = [row for row, (name, _, _) in enumerate(ROWS) if name.startswith(settings.rows)]
    if not rows:
        raise ConfigError(f"rows: got {settings.rows}; allowed: how one of {', '.join(ALGORITHMS)} begins")
    cells = [(row, staleness) for row in rows for staleness in STALENESS]
    tuning = [Job(*cell, rate, 0) for cell in cells for rate in RATES]
    with locked(file.parent):
        key = plain.model_dump_json(exclude_defaults=True)
        lines = read_lines(file)
        with atomic_write(file) as handle:  # without a last line that was cut off
            handle.writelines(json.dumps(line) + "\n" for line in lines)
        done = {Job(*line["job"]): line for line in lines if line["recipe"] == key}
        if done:
            each = median(line["seconds"] for line in done.values())
        else:
            short = settings.model_copy(update={"set": (*settings.set, f"steps={CALIBRATION_STEPS}")})
            line = play(tuning[0], short)
            each = line["seconds"] + (plain.steps - CALIBRATION_STEPS) * line["time/step"]
        total = len(cells) * (len(RATES) + len(SEEDS))
        left = total - sum(job[:2] in cells for job in done)
        hours = left * each / settings.jobs / 3600
        say(f"{left} of {total} runs are missing, about {each:.0f} s each: {hours:.2f} h, {settings.jobs} at a time")

        def run(jobs: Sequence[Job]) -> None:
            missing = [job for job in jobs if job not in done]
            with (
                ProcessPoolExecutor(settings.jobs, get_context("spawn"), max_tasks_per_child=1) as pool,
                Progress(len(missing), "run", "off-policy") as progress,
                file.open("a", encoding="utf-8") as handle,
            ):
                for future in as_completed([pool.submit(play, job, settings) for job in missing]):
                    line: dict[str, Any] = future.result() | {"recipe": key}
                    done[line["job"]] = line
                    handle.write(json.dumps(line) + "\n")
                    handle.flush()
                    progress.update(reward=round(line["reward"], 2))

        run(tuning)
        best = {cell: max(RATES, key=lambda rate, cell=cell: done[Job(*cell, rate, 0)]["reward"]) for cell in cells}
        run([Job(*cell, best[cell], seed) for cell in cells for seed in SEEDS])
    return table(rows, best, {job: line["reward"] for job, line in done.items()})


def table(rows: Sequence[int], best: Mapping[tuple[int, int], float], rewards: Mapping[Job, float]) -> str:
    """Means and standard deviations over SEEDS, with the rate of each cell."""
    head = ["algorithm", "updates a push", "reset", *(f"staleness {staleness}" for staleness in STALENESS)]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [(best[row, staleness], staleness) for staleness in STALENESS]
        found = [(rate, [rewards[Job(row, staleness, rate, seed)] for seed in SEEDS]) for rate, staleness in cells]
        name, push_every, resets = ROWS[row]
        shown = [f"{fmean(each):.2f} ± {stdev(each):.2f} (x {rate:g})" for rate, each in found]
        lines.append([name, str(push_every), "yes" if resets else "no", *shown])
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + (
        f"\n\nReward of the last weights on held-out tasks, mean ± standard deviation of {len(SEEDS)} seeds; in "
        f"brackets the rate relative to the recipe's, the best of {rates} on another seed."
    )
