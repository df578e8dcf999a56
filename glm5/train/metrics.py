"""Metrics of a run: JSON lines in a file, and a table on a terminal or else a log line per step.

    MFU = (6 N_active + 6 L H (qk + v) mean context) tokens/s / peak

with N_active the parameters that a token uses, head included, and the mean number of keys that attention reads.
Recomputation and indexers are not counted (training notes, 6b).
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TextIO

import torch

from glm5.common.atomic import atomic_write
from glm5.common.extras import require
from glm5.config.model import ModelConfig
from glm5.config.tensors import count_parameters
from glm5.config.train import StageConfig
from glm5.train.progress_table import LEAST_WIDTH, ProgressTable, clock_of, columns
from glm5.train.sliding_window import keys_read
from glm5.train.state import writing_to
from glm5.train.step import Phase

FILE = "metrics.jsonl"
_SHOWN = ("loss", "mtp", "index", "trunk norm", "lr", "tokens/s", "mfu", "held-out loss", "held-out accuracy")


def flops_per_token(cfg: ModelConfig, seq_len: int, phase: Phase) -> float:
    """FLOPs of forward and backward pass by the formula above; each sequence counts as one document."""
    dense = (seq_len + 1) / 2
    context = dense if phase.keys != "sparse" else min(cfg.index_topk, dense)
    if phase.window is not None:
        context = dense * keys_read(phase.window, cfg.num_hidden_layers, seq_len)
    attention = 6 * cfg.num_hidden_layers * cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim) * context
    active = count_parameters(cfg).active + cfg.vocab_size * cfg.hidden_size
    return 6 * active + attention


class MetricsLog:
    """Metrics of a stage. On entry, lines of steps that a resumed run repeats are removed from the file."""

    def __init__(
        self, out: Path, stage: StageConfig, first: int, stream: TextIO | None = None, *, tensorboard: bool = False
    ) -> None:
        """`tensorboard`: also write its files, to OUT/tensorboard/STAGE. Raises MissingExtra."""
        self._file, self._stage = out / FILE, stage
        self._stream = sys.stderr if stream is None else stream
        is_wide = columns(self._stream) >= LEAST_WIDTH
        title = f"{stage.name} ({stage.kind})"
        self._live = ProgressTable(title, stage.steps, first, self._stream) if is_wide else None
        self._board = check_board().SummaryWriter(str(out / "tensorboard" / stage.name)) if tensorboard else None
        self._first = first
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        with writing_to(self._file):
            _truncate(self._file, self._stage.name, self._first)
            self._handle = self._file.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.close()
        if self._board is not None:
            self._board.close()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a finished step; steps count from 1."""
        self._write({"stage": self._stage.name, "step": step, **metrics})
        if self._live is not None:
            self._live.step(step, metrics)
            return
        shown = {name: metrics[name] for name in _SHOWN if name in metrics}
        done = step - self._first
        eta = (time.monotonic() - self._start) / max(done, 1) * (self._stage.steps - step)
        text = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self._line(f"{self._stage.name} {step}/{self._stage.steps}: {text}, ETA {clock_of(eta)}")

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation after a step."""
        self._write({"stage": self._stage.name, "step": step, "held out": True, **metrics})
        if self._live is not None:
            self._live.held_out(metrics)
            self._live.release()  # messages about a checkpoint follow below the table
            return
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._line(f"{self._stage.name} {step}/{self._stage.steps}: {text}")

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _write(self, record: Mapping[str, Any]) -> None:
        with writing_to(self._file):
            self._handle.write(json.dumps({key: short(value) for key, value in record.items()}) + "\n")
            self._handle.flush()
            if self._board is not None:
                for name, value in record.items():
                    if isinstance(value, float):
                        self._board.add_scalar(name, value, record["step"])


class NoMetrics:
    """A `MetricsLog` that writes nothing, for all ranks but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None: ...


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


def _truncate(file: Path, stage: str, first: int) -> None:
    """Keep the records of earlier stages, and of this stage up to step `first`."""
    kept: list[str] = []
    for record in read_metrics(file.parent):
        if record["stage"] == stage and record["step"] > first:
            break
        kept.append(json.dumps(record) + "\n")
    with atomic_write(file) as handle:
        handle.writelines(kept)


def short(value: Any) -> Any:
    """A number with as many digits as the file has."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def check_board() -> Any:
    """Torch's module for TensorBoard. Raises MissingExtra where the package tensorboard is missing."""
    require("tensorboard", "tensorboard")
    return require("torch.utils.tensorboard", "tensorboard")
