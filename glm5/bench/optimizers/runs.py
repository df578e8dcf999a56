"""One short training with one optimizer, rate and seed, of which losses and times are kept.

Runs share the tokenizer and token files, which are prepared once. Runs of one seed see the same sequences.
"""

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm5.common.atomic import atomic_write
from glm5.config.train import Recipe, read_recipe
from glm5.train.build import Builder
from glm5.train.loop import train
from glm5.train.metrics import read_metrics

WAYS = {"Muon Split": ("muon", True), "Muon": ("muon", False), "AdamW": ("adamw", False)}
"""Of training matrices: `kind` and `split` of the recipe's optimizer."""
FIRST = 10  # untimed steps, in which kernels are compiled


@dataclass(frozen=True)
class Given:
    """What all runs share: the recipe file, its overrides and the folder of results."""

    recipe: Path
    settings: tuple[str, ...]
    out: Path

    def read(self, *more: str) -> Recipe:
        return read_recipe(self.recipe, [*self.settings, *more])

    def prepare(self) -> None:
        """Tokenizer and token files of all runs, in OUT/prepared. Raises DataError and ConfigError as training does."""
        Builder(self.read(), self.recipe.parent, self.out / "prepared").rows(self.read().stage[0])


@dataclass(frozen=True)
class Plan:
    """`rate`: the peak learning rate of matrices. `steps`: of the recipe's one stage. `alone`: without parallel
    runs."""

    way: str
    rate: float
    seed: int
    steps: int
    alone: bool = False

    @property
    def name(self) -> str:
        words = (self.way.lower().replace(" ", "-"), f"{self.rate:g}", f"seed-{self.seed}", f"{self.steps}-steps")
        return "-".join((*words, *(["alone"] if self.alone else [])))

    def settings(self, folder: Path, lr: float) -> Sequence[str]:
        """Overrides of the recipe, whose stage has the rate `lr`. Steps with a NaN loss are skipped, not fatal."""
        kind, split = WAYS[self.way]
        return (
            *(f"out={folder}", f"seed={self.seed}", f"skip_steps={self.steps}", f"stage.0.steps={self.steps}"),
            *(f"optimizer.kind={kind}", f"optimizer.split={str(split).lower()}"),
            f"optimizer.matrix_lr={self.rate / lr!r}",
        )


@dataclass(frozen=True)
class Done:
    """(tokens, loss) of all steps and of held-out evaluations; median seconds of a step, and of its optimizer."""

    plan: Plan
    losses: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    seconds: float
    optimizer: float

    @property
    def last(self) -> float:
        """The final held-out loss."""
        return self.held_out[-1][1]


def found(given: Given, plan: Plan) -> Done | None:
    """The result of an earlier run in OUT/NAME.json, if any."""
    file = given.out / f"{plan.name}.json"
    if not file.exists():
        return None
    read = json.loads(file.read_text(encoding="utf-8"))
    return Done(**{**read, "plan": Plan(**read["plan"])})


def run(given: Given, plan: Plan) -> Done:
    """Train, and write OUT/NAME.json. Weights are deleted; the log goes to OUT/NAME.log."""
    with (
        tempfile.TemporaryDirectory(prefix=f".{plan.name}-", dir=given.out) as name,
        (given.out / f"{plan.name}.log").open("w", encoding="utf-8") as log,
        redirect_stderr(log),
    ):
        folder = Path(name)
        shutil.copytree(given.out / "prepared", folder, dirs_exist_ok=True)
        train(given.read(*plan.settings(folder, given.read().stage[0].lr)), given.recipe.parent)
        done = _done(plan, read_metrics(folder))
    with atomic_write(given.out / f"{plan.name}.json") as handle:
        handle.write(json.dumps(asdict(done)) + "\n")
    return done


def _done(plan: Plan, records: Sequence[dict[str, Any]]) -> Done:
    steps = [record for record in records if "held out" not in record]
    tokens = {record["step"]: record["tokens"] for record in steps}
    timed = steps[FIRST:] or steps
    return Done(
        plan,
        [(record["tokens"], record["loss"]) for record in steps if "loss" in record],
        [(tokens[record["step"]], record["held-out loss"]) for record in records if "held out" in record],
        statistics.median(record["seconds"] for record in timed),
        statistics.median(record["optimizer seconds"] for record in timed),
    )
