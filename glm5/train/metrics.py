"""Metrics of a run: JSON lines in a file, and a table on a terminal or else a log line per step.

    MFU = (6 N_active + 6 L H (qk + v) mean context) tokens/s / peak

with N_active the parameters that a token uses, head included, and the mean number of keys that attention reads.
Recomputation and indexers are not counted (training notes, 6b).
"""

import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Self, TextIO

import torch

from glm5.common.atomic import atomic_write
from glm5.common.errors import TrainingError
from glm5.common.extras import require
from glm5.config.model import ModelConfig
from glm5.config.rl import RLRecipe
from glm5.config.tensors import count_parameters
from glm5.config.train import Recipe, StageConfig
from glm5.train.progress_table import LEAST_WIDTH, LEFT, RIGHT, ProgressTable, clock_of, columns
from glm5.train.sliding_window import keys_read
from glm5.train.state import writing_to
from glm5.train.step import Phase

FILE = "metrics.jsonl"
_LOG = logging.getLogger("glm5")
_OF_PAIRS = ("accuracy", "margin", "calibration error", "calibrated error", "temperature")
_HELD_OUT = ("held-out loss", "held-out accuracy")
_SHOWN = ("loss", *_OF_PAIRS, "mtp", "index", "trunk norm", "lr", "tokens/s", "mfu", *_HELD_OUT)


def flops_per_token(cfg: ModelConfig, seq_len: int, phase: Phase) -> float:
    """FLOPs of forward and backward pass by the formula above; each sequence counts as one document."""
    dense = (seq_len + 1) / 2
    context = dense if phase.keys != "sparse" else min(cfg.index_topk, dense)
    if phase.window is not None:
        context = dense * keys_read(phase.window, cfg.num_hidden_layers, seq_len)
    attention = 6 * cfg.num_hidden_layers * cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim) * context
    active = count_parameters(cfg).active + cfg.vocab_size * cfg.hidden_size
    return 6 * active + attention


class StepLog:
    """The figures of steps: a line of JSON each in a file, and a table on a terminal, else a line of text each.

    `file`: on entry it keeps the lines that `kept` gives. `shown`: names in a line of text; `table`: those on the left
    and on the right of the table. `board`: the folder of TensorBoard's files, `wandb`: what Weights & Biases' `init` is
    told of the run, if asked for. Raises MissingExtra.
    """

    def __init__(
        self,
        file: Path,
        name: str,
        steps: int,
        first: int,
        stream: TextIO | None,
        *,
        title: str,
        shown: Sequence[str],
        board: Path | None,
        wandb: Mapping[str, Any] | None,
        table: tuple[Sequence[str], Sequence[str]] = (LEFT, RIGHT),
    ) -> None:
        self._file, self._name, self._steps, self._first, self._shown = file, name, steps, first, shown
        self._stream = sys.stderr if stream is None else stream
        is_wide = columns(self._stream) >= LEAST_WIDTH
        left, right = table
        self._live = ProgressTable(title, steps, first, self._stream, left=left, right=right) if is_wide else None
        self._board = None if board is None else check_board().SummaryWriter(str(board))
        self._wandb = None if wandb is None else _start_wandb(file.parent, wandb)
        self._began = time.monotonic()

    def kept(self) -> Iterable[Mapping[str, Any]]:
        """The records of the file that a run that goes on does not repeat."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        with writing_to(self._file):
            lines = [json.dumps(record) + "\n" for record in self.kept()]
            with atomic_write(self._file) as handle:
                handle.writelines(lines)
            self._handle = self._file.open("a", encoding="utf-8")
        for handler in _LOG.handlers if self._live is not None else ():
            handler.addFilter(self._make_room)
        return self

    def __exit__(self, *error: object) -> None:
        for handler in _LOG.handlers:
            handler.removeFilter(self._make_room)
        self._handle.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a finished step; steps count from 1."""
        self.write(step, metrics)
        if self._live is not None:
            self._live.step(step, metrics)
            return
        seconds = (time.monotonic() - self._began) / max(1, step - self._first) * (self._steps - step)
        shown = {name: metrics[name] for name in self._shown if name in metrics}
        self.say(f"{self._name} {step}/{self._steps}", shown, f", ETA {clock_of(seconds)}")

    def release(self) -> None:
        """Other output follows."""
        if self._live is not None:
            self._live.release()

    def _make_room(self, record: logging.LogRecord) -> bool:
        """A filter of log lines, each of which is other output."""
        self.release()
        return True

    def say(self, head: str, metrics: Mapping[str, float], end: str = "") -> None:
        """A line of text."""
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._stream.write(f"{head}: {text}{end}\n")
        self._stream.flush()

    def write(self, step: int, metrics: Mapping[str, float], **about: Any) -> None:
        """A record in the file, `about` before its figures."""
        metrics = {name: short(value) for name, value in metrics.items()}
        with writing_to(self._file):
            self._handle.write(json.dumps({**about, "step": step, **metrics}) + "\n")
            self._handle.flush()
            if self._board is not None:
                for name, value in metrics.items():
                    self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)


class MetricsLog(StepLog):
    """Metrics of a stage. As `recipe` says, it also writes TensorBoard's files, to OUT/tensorboard/STAGE, and logs to
    Weights & Biases, a run for each stage in the group of the recipe's name. Raises MissingExtra."""

    def __init__(self, out: Path, recipe: Recipe, stage: StageConfig, first: int, stream: TextIO | None = None) -> None:
        board = out / "tensorboard" / stage.name if recipe.tensorboard else None
        about = {"project": "glm5-train", "group": recipe.name, "name": f"{recipe.name} {stage.name}"}
        about |= {"config": json.loads(recipe.model_dump_json())}
        super().__init__(
            out / FILE,
            stage.name,
            stage.steps,
            first,
            stream,
            title=f"{stage.name} ({stage.kind})",
            shown=_SHOWN,
            board=board,
            wandb=about if recipe.wandb else None,
        )

    def kept(self) -> Iterable[Mapping[str, Any]]:
        """The records of earlier stages, and of this stage up to the first step."""
        return takewhile(
            lambda one: one["stage"] != self._name or one["step"] <= self._first, read_metrics(self._file.parent)
        )

    def write(self, step: int, metrics: Mapping[str, float], **about: Any) -> None:
        super().write(step, metrics, stage=self._name, **about)

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation after a step."""
        self.write(step, metrics, **{"held out": True})
        if self._live is not None:
            self._live.held_out(metrics)
            return
        self.say(f"{self._name} {step}/{self._steps}", metrics)


class NoMetrics:
    """A `MetricsLog` that writes nothing, for all ranks but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def release(self) -> None: ...


def memory(device: torch.device) -> float:
    """Peak memory in GiB: allocated by torch on a GPU, else resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """All records of a run, in order. A truncated last line is left out."""
    file = out / FILE
    if not file.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def short(value: Any) -> Any:
    """A number with as many digits as the file has."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def check_extras(recipe: Recipe | RLRecipe) -> None:
    """Raises MissingExtra where the recipe asks for a package that is not installed."""
    if recipe.tensorboard:
        check_board()
    if recipe.wandb:
        check_wandb()


def check_board() -> Any:
    """Torch's module for TensorBoard. Raises MissingExtra where the package tensorboard is missing."""
    require("tensorboard", "tensorboard")
    return require("torch.utils.tensorboard", "tensorboard")


def _start_wandb(out: Path, about: Mapping[str, Any]) -> Any:
    """A run of Weights & Biases. Raises MissingExtra, and TrainingError where it cannot be begun."""
    wandb = check_wandb()
    try:
        return wandb.init(dir=out, **about)
    except wandb.Error as error:
        raise TrainingError(
            f"Weights & Biases: {str(error).partition(chr(10))[0]} WANDB_MODE=offline keeps the figures in {out}/wandb"
        ) from error


def check_wandb() -> Any:
    """Weights & Biases' module. Raises MissingExtra."""
    return require("wandb", "wandb")
