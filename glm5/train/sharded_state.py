"""A sharded training state: each process writes its rows, and any number of processes read the rows they need.

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
"""Exceptions of reading a damaged file of tensors."""
SavedShard = Mapping[str, Any]
Span = tuple[int, int]


def read_parts(state: Mapping[str, Any], folder: Path, rank: int = 0, num_ranks: int = 1) -> list[SavedShard]:
    """The parts that a state file names, or the state itself as one part. Tensors are memory-mapped.

    Each file is checked by one of the `num_ranks` ranks. Raises `TrainingError`.
    """
    if files := state.get("parts"):
        return [_read_part(folder / file, check=offset % num_ranks == rank) for offset, file in enumerate(files)]
    named = {name for name in state["model"] if not name.endswith("e_score_correction_bias")}
    shapes = {name: tuple(state["model"][name].shape) for name in named}
    return [
        {
            "spans": {name: [(0, num_rows(shape))] for name, shape in shapes.items()},
            "shapes": shapes,
            "weights": {name: state["model"][name] for name in named},
            "optimizer": state["optimizer"],
            "buffers": {name: value for name, value in state["model"].items() if name not in named},
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
    """Verify the checksums of a file of tensors. Raises `TrainingError` where one is wrong.

    `torch.save` writes a checksum for each record, which `torch.load` ignores when it memory-maps tensors.
    """
    with zipfile.ZipFile(file) as archive:
        wrong = archive.testzip()
    if wrong is not None:
        raise _unreadable(file, f"it is damaged, first in record {wrong}")


def damaged(file: Path, error: Exception) -> TrainingError:
    """The `TrainingError` for one of `DAMAGED`."""
    reason = error.strerror if isinstance(error, OSError) else None
    return _unreadable(file, reason or "it is damaged")


def _unreadable(file: Path, reason: str) -> TrainingError:
    return TrainingError(
        f"{file} cannot be read ({reason}); begin anew with --restart, or start a recipe from a checkpoint of this run"
    )


def full_state(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """{"model", "optimizer"} with unsharded tensors."""
    if not state.get("parts"):
        return {"model": state["model"], "optimizer": state["optimizer"]}
    parts = read_parts(state, folder)
    shapes = {name: shape for part in parts for name, shape in part["shapes"].items()}
    model = {name: weight_rows(parts, name, [(0, num_rows(shape))]).view(shape) for name, shape in shapes.items()}
    optimizer = {
        name: {
            key: value.view(shapes[name]) if value.dim() else value
            for key, value in state_rows(parts, name, [(0, num_rows(shapes[name]))]).items()
        }
        for name in dict.fromkeys(name for part in parts for name in part["optimizer"])
    }
    return {"model": model | buffers(parts), "optimizer": optimizer}


def weight_rows(parts: Sequence[SavedShard], name: str, spans: Sequence[Span]) -> Tensor:
    """Rows `spans` of a weight, concatenated: [n, C]; [n] for a vector."""
    return _rows(parts, name, lambda part: part["weights"][name], spans)


def state_rows(parts: Sequence[SavedShard], name: str, spans: Sequence[Span]) -> dict[str, Tensor]:
    """Rows `spans` of an optimizer's state of a weight; scalars are returned unchanged. {} if there is no state."""
    holders = [part for part in parts if name in part["optimizer"]]
    if not holders:
        return {}
    first = holders[0]["optimizer"][name]
    return {
        key: rows if not rows.dim() else _rows(holders, name, lambda part, key=key: part["optimizer"][name][key], spans)
        for key, rows in first.items()
    }


def buffers(parts: Sequence[SavedShard]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part["buffers"].items()}


def num_rows(shape: Sequence[int]) -> int:
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def _rows(parts: Sequence[SavedShard], name: str, of: Callable[[SavedShard], Tensor], spans: Sequence[Span]) -> Tensor:
    """Rows `spans` of the tensor that `of` takes from a part. KeyError where the parts do not hold all of them."""
    found: list[tuple[int, Tensor]] = []
    shape: Sequence[int] = ()
    for part in parts:
        if name not in part["spans"]:
            continue
        shape = part["shapes"][name]
        rows = of(part).reshape(-1) if len(shape) == 1 else of(part).reshape(-1, shape[-1])
        offset = 0
        for start, stop in part["spans"][name]:
            for order, (first, last) in enumerate(spans):
                begin, end = max(start, first), min(stop, last)
                if begin < end:
                    found.append((order * (1 << 40) + begin, rows[offset + begin - start : offset + end - start]))
            offset += stop - start
    found.sort(key=lambda value: value[0])
    wanted = sum(stop - start for start, stop in spans)
    if sum(len(rows) for _, rows in found) != wanted:
        raise KeyError(f"{name}: rows {list(spans)} are not all in the state")
    width = shape[1:] and shape[-1:]
    return torch.cat([rows for _, rows in found]) if found else torch.empty(0, *width)
