"""What people see of a run: a line a step in metrics.jsonl, and on the terminal; TensorBoard and Weights & Biases."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from glm5.common.atomic import atomic_write
from glm5.common.bounded import TABLES, read_bounded_text
from glm5.common.errors import TrainingError
from glm5.common.extras import require
from glm5.config.rl import RLRecipe
from glm5.rl.waits import PREDICTED
from glm5.train.metrics import check_board, short
from glm5.train.progress_table import LEAST_WIDTH, ProgressTable, clock_of, columns
from glm5.train.state import writing_to

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
SHOWN = ("reward/mean", "entropy", "is/mask_frac", "kl/mismatch", "len/mean", "grad/norm", "perf/rollout_tok_s")
"""In a log's line of a step; the table on a terminal has more, on its right side without means."""
_RIGHT = (
    "eval/mean",
    "eval/pass@1",
    "time/rollout",
    "time/train",
    "time/push",
    "wait/trainer",
    "perf/rollout_tok_s",
    "perf/mfu",
)
_LEFT = (*SHOWN[:-1], "turns/mean", "group/dropped")


LOW_ENTROPY, LOW_STEPS = 0.01, 5
"""Nats a token below which a policy hardly explores, and the steps in a row after which that is told."""


class Watch:
    """The metrics of a run. On entry, lines that a resumed run repeats are removed: those of steps after `first`, and
    of a run at its beginning all."""

    def __init__(self, out: Path, recipe: RLRecipe, first: int, stream: TextIO | None = None) -> None:
        self._file, self._recipe, self._first = out / FILE, recipe, first
        self._stream = sys.stderr if stream is None else stream
        self._board = check_board().SummaryWriter(str(out / "tensorboard")) if recipe.tensorboard else None
        self._wandb: Any = None
        if recipe.wandb:
            settings = json.loads(recipe.model_dump_json())
            self._wandb = require("wandb", "wandb").init(project="glm5-rl", name=recipe.name, config=settings, dir=out)
        is_wide = columns(self._stream) >= LEAST_WIDTH
        self._live = (
            ProgressTable(recipe.name, recipe.steps, first, self._stream, left=_LEFT, right=_RIGHT) if is_wide else None
        )
        self._began = time.monotonic()
        self._low_steps, self._has_warned = 0, False

    def __enter__(self) -> Self:
        with writing_to(self._file):
            kept = [line for line in read_lines(self._file) if 0 < self._first >= line["step"]]
            with atomic_write(self._file) as handle:
                handle.writelines(json.dumps(line) + "\n" for line in kept)
            self._handle = self._file.open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics after `step` steps."""
        self._write({"step": step, **metrics})
        self._watch_entropy(step, metrics.get("entropy", LOW_ENTROPY))
        if self._live is not None:
            self._live.step(step, metrics)
            return
        shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics)
        left = self._recipe.steps - step
        eta = clock_of((time.monotonic() - self._began) / max(1, step - self._first) * left)
        self._say(f"{self._recipe.name} {step}/{self._recipe.steps}: {shown}, ETA {eta}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of an evaluation after `step` steps."""
        self._write({"step": step, **metrics})
        if self._live is not None:
            self._live.held_out(metrics)
            return
        self._say(f"{self._recipe.name} {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))

    def predicted(self, step: int, figures: Mapping[str, float]) -> None:
        """What was predicted of the run after `step` steps."""
        self._write({"step": step, **{PREDICTED + name: value for name, value in figures.items()}})

    def release(self) -> None:
        """Other output follows."""
        if self._live is not None:
            self._live.release()

    def _watch_entropy(self, step: int, entropy: float) -> None:
        """Warn once of a policy that hardly explores."""
        self._low_steps = self._low_steps + 1 if entropy < LOW_ENTROPY else 0
        if self._low_steps == LOW_STEPS and not self._has_warned:
            self._has_warned = True
            self.release()
            logger.warning(
                "step %d: the entropy has been below %g nats a token for %d steps, now %.2g: the rollouts of a task "
                "are nearly alike, and little can be learnt from them; if the reward is not yet what it should be, "
                "raise algorithm.entropy or rollouts.temperature in a new run",
                step,
                LOW_ENTROPY,
                LOW_STEPS,
                entropy,
            )

    def _say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _write(self, record: Mapping[str, Any]) -> None:
        record = {name: short(one) for name, one in record.items()}
        with writing_to(self._file):
            self._handle.write(json.dumps(record) + "\n")
            self._handle.flush()
        numbers = {name: one for name, one in record.items() if isinstance(one, float | int) and name != "step"}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=record["step"])


def check_extras(recipe: RLRecipe) -> None:
    """Raises MissingExtra where the recipe asks for a package that is not installed."""
    if recipe.tensorboard:
        check_board()
    if recipe.wandb:
        require("wandb", "wandb")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file of lines with a `step`, in order; a cut-off last line is left out."""
    found: list[Any] = []
    if file.exists():
        with suppress(ValueError, RecursionError):
            found.extend(json.loads(line) for line in read_bounded_text(file, TABLES, TrainingError).splitlines())
    steps = [line for line in found if isinstance(line, dict) and isinstance(line.get("step"), int)]
    return [line for line in steps if is_number(line["step"])]


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of the run in `out`, without what is no number: files may be damaged."""
    return [{name: one for name, one in line.items() if is_number(one)} for line in read_lines(out / FILE)]


def is_number(value: Any) -> bool:
    """Whether it is a number that a float or 64 bits hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
