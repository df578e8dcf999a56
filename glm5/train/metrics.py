"""What a run says while it goes: a line a step in a log, a table on a terminal, and JSON lines always.

    MFU = (6 N_active + 6 L H (qk + v) mean context) tokens/s / peak

with N_active the parameters a token uses, head included, and the keys that attention reads on average; nothing that is
computed twice is counted, nor are the indexers (training notes, 6b).
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TextIO

import torch

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
    """Forward and backward, as the formula at the top; documents are taken to fill their sequence."""
    dense = (seq_len + 1) / 2
    context = dense if phase.keys != "sparse" else min(cfg.index_topk, dense)
    if phase.window is not None:
        context = dense * keys_read(phase.window, cfg.num_hidden_layers, seq_len)
    attention = 6 * cfg.num_hidden_layers * cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim) * context
    active = count_parameters(cfg).active + cfg.vocab_size * cfg.hidden_size
    return 6 * active + attention


class MetricsLog:
    """Figures of a stage, step by step. Lines of steps that are done again after a kill are taken back first."""

    def __init__(
        self, out: Path, stage: StageConfig, first: int, stream: TextIO | None = None, *, tensorboard: bool = False
    ) -> None:
        """`tensorboard`: write its files too, into OUT/tensorboard, a folder for each stage. Raises MissingExtra."""
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
            _take_back(self._file, self._stage.name, self._first)
            self._handle = self._file.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.close()
        if self._board is not None:
            self._board.close()

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of a step that is done, step counting from 1."""
        self._write({"stage": self._stage.name, "step": step, **figures})
        if self._live is not None:
            self._live.step(step, figures)
            return
        shown = {name: figures[name] for name in _SHOWN if name in figures}
        done = step - self._first
        eta = (time.monotonic() - self._start) / max(done, 1) * (self._stage.steps - step)
        text = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self._line(f"{self._stage.name} {step}/{self._stage.steps}: {text}, ETA {clock_of(eta)}")

    def held_out(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of an evaluation behind a step."""
        self._write({"stage": self._stage.name, "step": step, "held out": True, **figures})
        if self._live is not None:
            self._live.held_out(figures)
            self._live.leave()  # what is said of a checkpoint comes below
            return
        text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self._line(f"{self._stage.name} {step}/{self._stage.steps}: {text}")

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _write(self, record: Mapping[str, Any]) -> None:
        with writing_to(self._file):
            self._handle.write(json.dumps({key: _short(value) for key, value in record.items()}) + "\n")
            self._handle.flush()
            if self._board is not None:
                for name, value in record.items():
                    if isinstance(value, float):
                        self._board.add_scalar(name, value, record["step"])


class NoMetrics:
    """A `MetricsLog` of a process that others speak for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def step(self, step: int, figures: Mapping[str, float]) -> None: ...

    def held_out(self, step: int, figures: Mapping[str, float]) -> None: ...


def memory(device: torch.device) -> float:
    """GiB at most in use so far: of a GPU what torch held, else what the process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """All records of a run, in order. A last line that a kill cut in half is left out."""
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


def _take_back(file: Path, stage: str, first: int) -> None:
    """Keep the records of stages before, and of this stage up to the step that the run goes on behind."""
    kept: list[str] = []
    for record in read_metrics(file.parent):
        if record["stage"] == stage and record["step"] > first:
            break
        kept.append(json.dumps(record) + "\n")
    building = file.with_name(f".{file.name}.new")
    building.write_text("".join(kept), encoding="utf-8")
    os.replace(building, file)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def check_board() -> Any:
    """Torch's module for TensorBoard. Raises MissingExtra where the package, which that one asks for, is missing."""
    require("tensorboard", "tensorboard")
    return require("torch.utils.tensorboard", "tensorboard")
