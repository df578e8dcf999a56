"""A state that several processes hold: each writes the rows it has, and any number of processes read what they need.

    {"spans": {name: [(start, stop), ...]}, "shapes": {name: shape}, "weights": {name: rows},
     "optimizer": {name: {key: rows, or a number}}, "buffers": {name: tensor}}

Rows are those of a tensor's view [R, C] (train/parallel/row_layout.py). A state of one process is one part with all
rows.
"""

import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.common.errors import TrainingError

DAMAGED = (
    *(AttributeError, EOFError, LookupError, OSError, OverflowError, RuntimeError, TypeError, ValueError),
    *(pickle.UnpicklingError, struct.error, zipfile.BadZipFile, zlib.error),
)
"""What reading a file of tensors raises, where it is none, or holds something else."""
SavedShard = Mapping[str, Any]
Span = tuple[int, int]


def read_parts(state: Mapping[str, Any], folder: Path, rank: int = 0, num_ranks: int = 1) -> list[SavedShard]:
    """Of a state file's content: what it names, or the content itself. Tensors are read when they are used.

    The files are checked by all of `num_ranks` together, each by one of them. Raises `TrainingError`.
    """
    if files := state.get("parts"):
        return [_read_part(folder / file, check=at % num_ranks == rank) for at, file in enumerate(files)]
    named = {name for name in state["model"] if not name.endswith("e_score_correction_bias")}
    shapes = {name: tuple(state["model"][name].shape) for name in named}
    return [
        {
            "spans": {name: [(0, num_rows(shape))] for name, shape in shapes.items()},
            "shapes": shapes,
            "weights": {name: state["model"][name] for name in named},
            "optimizer": state["optimizer"],
            "buffers": {name: one for name, one in state["model"].items() if name not in named},
        }
    ]


def _read_part(file: Path, *, check: bool) -> SavedShard:
    try:
        if check:
            check_bytes(file)
        return torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except DAMAGED as error:
        raise damaged(file, error) from None


def check_bytes(file: Path) -> None:
    """Read a file of tensors once. Raises `TrainingError` where bytes are not those that were written.

    `torch.save` puts a sum beside each record, which `torch.load` does not look at where it maps tensors.
    """
    with zipfile.ZipFile(file) as archive:
        wrong = archive.testzip()
    if wrong is not None:
        raise _unreadable(file, f"it is damaged, first in record {wrong}")


def damaged(file: Path, error: Exception) -> TrainingError:
    """What to say of one of `DAMAGED`."""
    reason = error.strerror if isinstance(error, OSError) else None
    return _unreadable(file, reason or "it is damaged")


def _unreadable(file: Path, reason: str) -> TrainingError:
    return TrainingError(
        f"{file} cannot be read ({reason}); begin anew with --restart, or start a recipe from a checkpoint of this run"
    )


def whole_state(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """{"model", "optimizer"} with whole tensors."""
    if not state.get("parts"):
        return {"model": state["model"], "optimizer": state["optimizer"]}
    parts = read_parts(state, folder)
    shapes = {name: shape for part in parts for name, shape in part["shapes"].items()}
    model = {name: weight_rows(parts, name, [(0, num_rows(shape))]).view(shape) for name, shape in shapes.items()}
    optimizer = {
        name: {
            key: one.view(shapes[name]) if one.dim() else one
            for key, one in state_rows(parts, name, [(0, num_rows(shapes[name]))]).items()
        }
        for name in dict.fromkeys(name for part in parts for name in part["optimizer"])
    }
    return {"model": model | buffers(parts), "optimizer": optimizer}


def weight_rows(parts: Sequence[SavedShard], name: str, spans: Sequence[Span]) -> Tensor:
    """Rows of a weight, below each other: [n, C], of a vector [n]."""
    return _rows(parts, name, lambda part: part["weights"][name], spans)


def state_rows(parts: Sequence[SavedShard], name: str, spans: Sequence[Span]) -> dict[str, Tensor]:
    """An optimizer's state of a weight: rows as the weight's, numbers as they are. {} where it had none."""
    holders = [part for part in parts if name in part["optimizer"]]
    if not holders:
        return {}
    first = holders[0]["optimizer"][name]
    return {
        key: one if not one.dim() else _rows(holders, name, lambda part, key=key: part["optimizer"][name][key], spans)
        for key, one in first.items()
    }


def buffers(parts: Sequence[SavedShard]) -> dict[str, Tensor]:
    return {name: one for part in parts for name, one in part["buffers"].items()}


def num_rows(shape: Sequence[int]) -> int:
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def _rows(parts: Sequence[SavedShard], name: str, of: Callable[[SavedShard], Tensor], spans: Sequence[Span]) -> Tensor:
    """KeyError where the parts do not hold all of the rows."""
    found: list[tuple[int, Tensor]] = []
    shape: Sequence[int] = ()
    for part in parts:
        if name not in part["spans"]:
            continue
        shape = part["shapes"][name]
        rows = of(part).reshape(-1) if len(shape) == 1 else of(part).reshape(-1, shape[-1])
        at = 0
        for start, stop in part["spans"][name]:
            for order, (first, last) in enumerate(spans):
                begin, end = max(start, first), min(stop, last)
                if begin < end:
                    found.append((order * (1 << 40) + begin, rows[at + begin - start : at + end - start]))
            at += stop - start
    found.sort(key=lambda one: one[0])
    wanted = sum(stop - start for start, stop in spans)
    if sum(len(rows) for _, rows in found) != wanted:
        raise KeyError(f"{name}: rows {list(spans)} are not all in the state")
    width = shape[1:] and shape[-1:]
    return torch.cat([rows for _, rows in found]) if found else torch.empty(0, *width)
