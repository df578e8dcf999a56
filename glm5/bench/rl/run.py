"""Tunes both sides, then runs them in turn, a seed after the other; what they wrote is read while they run.

Wall and processor time of a run count from its line of step 0, when the first rollouts begin: start, import, and the
last evaluation are left out. Processor time is that of all processes of a side.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import sysconf
from pathlib import Path
from statistics import fmean, median

import torch

from glm5.bench.rl.sides import Choice, Side, job
from glm5.checkpoint.save import save
from glm5.common.bounded import read_bounded_text
from glm5.common.errors import GlmError
from glm5.config.bench_rl import BenchRLConfig
from glm5.config.rl import RLRecipe
from glm5.rl.build import PolicyBuilder
from glm5.rl.trainer import PolicyTrainer, arithmetic
from glm5.rl.watch import FILE, read_lines

TUNING_STEPS, COLD_STEPS = 6, 2
"""Steps of a run that tunes, and the first ones of other runs, whose speed does not count."""
WINDOW = 5
"""Steps over which a reward is averaged."""
LIMIT_S = 3600.0
_POLL_S = 0.02
_LOG = 2**24


@dataclass(frozen=True)
class Step:
    """A finished step: what its program wrote, and the seconds since the first step began, wall and processor."""

    figures: Mapping[str, float]
    wall: float
    cpu: float


@dataclass
class Measured:
    """Of one side. `tried`: seconds of a step by choice, or the error. `runs`: steps by seed."""

    name: str
    choice: Choice
    tried: list[tuple[Choice, float | str]]
    runs: dict[int, list[Step]] = field(default_factory=dict[int, list[Step]])

    def rates(self, name: str) -> dict[str, float]:
        """Over the steps of all seeds. On a machine that others use too, the fastest step says more than the median."""
        found = [step.figures[name] for run in self.runs.values() for step in run[COLD_STEPS:]]
        return {"median": median(found), "fastest": max(found)}

    def reached(self, seed: int, reward: float) -> Step | None:
        """The first step at which the mean of the last `WINDOW` rewards is `reward` or more."""
        run = self.runs[seed]
        means = [fmean(_rewards(run[end - WINDOW : end])) for end in range(WINDOW, len(run) + 1)]
        return next((run[i + WINDOW - 1] for i, mean in enumerate(means) if mean >= reward), None)

    def final(self, seed: int) -> float:
        """The mean reward of the last `WINDOW` steps."""
        return fmean(_rewards(self.runs[seed][-WINDOW:]))


def _rewards(steps: Sequence[Step]) -> list[float]:
    return [step.figures["reward/mean"] for step in steps]


def measure(
    sides: Sequence[Side],
    recipe: RLRecipe,
    settings: BenchRLConfig,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> list[Measured]:
    """The sides in turn for each seed, each with its best choice. Raises GlmError where a run fails."""
    out = Path(settings.out)
    checkpoint = _checkpoint(recipe, out / "checkpoint")

    def run(side: Side, seed: int, steps: int, choice: Choice) -> list[Step]:
        folder = out / side.name.replace(" ", "-") / f"seed-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        file = folder / "job.json"
        file.write_text(json.dumps(job(recipe, checkpoint, folder, steps, seed, choice), indent=1))
        found = follow([*side.command, str(file)], folder, environment)
        if len(found) < steps:
            raise GlmError(f"{side.name} ended after {len(found)} of {steps} steps; {_last_words(folder)}")
        return found

    measured = [tuned(side, lambda c, s=side: run(s, settings.seeds[0], TUNING_STEPS, c), say) for side in sides]
    for seed in settings.seeds:
        for side, one in zip(sides, measured, strict=True):
            one.runs[seed] = run(side, seed, recipe.steps, one.choice)
            last = one.runs[seed][-1]
            times = f"{last.wall:.1f} s, processor {last.cpu:.1f} s"
            say(f"{side.name}, seed {seed}: reward {one.final(seed):.3f}, {times}")
    return measured


def _checkpoint(recipe: RLRecipe, folder: Path) -> Path:
    """The model with which both sides begin: the recipe's, after its warm start."""
    device = torch.device("cpu")
    with arithmetic(recipe, device):
        builder = PolicyBuilder(recipe, folder.parent)
        trainer = PolicyTrainer(recipe, builder, device)
        trainer.warm_up()
        return save(trainer.model, folder, assets=builder.assets)


def tuned(side: Side, run: Callable[[Choice], list[Step]], say: Callable[[str], None]) -> Measured:
    """One choice after the other, with the best of those before; the fastest step counts. GlmError if none works."""
    best = {name: values[0] for name, values in side.choices.items()}
    tried: list[tuple[Choice, float | str]] = []
    least = float("inf")
    for name, values in side.choices.items():
        for value in values if not tried else values[1:]:
            choice = best | {name: value}
            try:
                result = min(step.figures["time/step"] for step in run(choice))
            except GlmError as error:
                result = str(error)
            tried.append((choice, result))
            say(f"{side.name}, {choice}: {result if isinstance(result, str) else f'{result:.3f} s a step'}")
            if isinstance(result, float) and result < least:
                least, best = result, choice
    if least == float("inf"):
        raise GlmError(f"{side.name}: no choice works; the last one: {tried[-1][1]}")
    return Measured(side.name, best, tried)


def follow(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> list[Step]:
    """The steps of a program that writes `folder`/metrics.jsonl; what it says goes to `folder`/log.txt. It is ended
    after LIMIT_S. Raises GlmError where it fails."""
    found, start, cpu, size = list[Step](), (0.0, 0.0), 0.0, 0
    deadline, has_ended = time.monotonic() + LIMIT_S, False
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=dict(environment)) as process,
    ):
        try:
            while not has_ended:
                has_ended = process.poll() is not None
                if time.monotonic() > deadline:
                    raise GlmError(f"{command[0]}: took more than {LIMIT_S:g} s; {_last_words(folder)}")
                time.sleep(_POLL_S)
                now = (folder / FILE).stat().st_size if (folder / FILE).exists() else 0
                if now == size:
                    continue
                size, lines = now, read_lines(folder / FILE)
                wall, cpu = time.monotonic(), max(cpu, processor_seconds(process.pid))
                steps = [line for line in lines if "time/step" in line]
                if not steps:
                    start = wall, cpu
                found += [Step(line, wall - start[0], cpu - start[1]) for line in steps[len(found) :]]
        finally:
            process.terminate()
    if process.returncode:
        raise GlmError(f"{command[0]}: ended with code {process.returncode}; {_last_words(folder)}")
    return found


def processor_seconds(pid: int) -> float:
    """Of a process and all that descend from it; 0 where /proc is not Linux's."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(stat.parent.name)
        parents[number], ticks[number] = int(words[1]), sum(map(int, words[11:15]))  # own time, and of ended children
    family, grown = {pid}, True
    while grown:
        more = {one for one, parent in parents.items() if parent in family} - family
        family, grown = family | more, bool(more)
    return sum(ticks.get(one, 0) for one in family) / sysconf("SC_CLK_TCK")


def _last_words(folder: Path) -> str:
    lines = read_bounded_text(folder / "log.txt", _LOG, GlmError).strip().splitlines() or ["nothing"]
    return f"it said last: {lines[-1][:300]} ({folder / 'log.txt'})"
