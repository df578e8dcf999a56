"""Writes safetensors shards one tensor at a time: memory holds only the current tensor.

The layout (names, dtypes, shapes) is known in advance, so every header is written first. Within a file wider dtypes
come first, so that each tensor is aligned to its own width as readers expect; tensors may be written in any order
within their shard.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import uuid4

import torch
from torch import Tensor

from glm5.checkpoint.shard import DTYPES, ITEM_BYTES, SAVE_KEY
from glm5.common.progress import Progress

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PIECE_BYTES = 8 << 20  # copied at a time from a device, or from a tensor that is not contiguous


@dataclass(frozen=True)
class TensorLayout:
    """One tensor to be written; `dtype` is safetensors' code."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_shards(
    directory: Path, layout: Sequence[TensorLayout], tensors: Iterable[Tensor], max_shard_bytes: int, desc: str
) -> None:
    """Write `tensors`, which come in the order of `layout`, as shards of at most `max_shard_bytes` plus the index.

    Writes a single file without index when all tensors fit. A tensor larger than the limit gets a shard of its own.
    Several files carry the id of their save, so that shards of two saves are never mixed up (index.py).
    """
    shards = split_shards(layout, max_shard_bytes)
    total_bytes = sum(tensor.num_bytes for tensor in layout)
    names = [shard_name(i, len(shards)) for i in range(len(shards))]
    source, save = iter(tensors), uuid4().hex if len(shards) > 1 else None
    with Progress(total=total_bytes, unit="B", desc=desc) as progress:
        for name, shard in zip(names, shards, strict=True):
            for planned in write_file(directory / name, shard, source, save):
                progress.update(planned.num_bytes, shard=name)
    surplus = next(source, None)  # also runs the generator to its end
    assert surplus is None, "more tensors than the layout names"
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(
    path: Path, layout: Sequence[TensorLayout], tensors: Iterator[Tensor], save: str | None = None
) -> Iterator[TensorLayout]:
    """Write one file with the tensors of `layout`, in its order, and flush it to disk; yields each as it is written.
    `save`: the id of the save that the file belongs to."""
    with path.open("wb") as file:
        offsets = _write_header(file, layout, save)
        for planned in layout:
            _write_tensor(file, offsets[planned.name], planned, next(tensors))
            yield planned
        file.flush()
        os.fsync(file.fileno())


def split_shards(layout: Sequence[TensorLayout], max_shard_bytes: int) -> list[list[TensorLayout]]:
    """Consecutive groups of at most `max_shard_bytes` each, at least one tensor a group."""
    shards: list[list[TensorLayout]] = [[]]
    room = max_shard_bytes
    for tensor in layout:
        if shards[-1] and tensor.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def shard_name(shard_idx: int, num_shards: int) -> str:
    """`model-00001-of-00141.safetensors`, or `model.safetensors` for the only one."""
    return SINGLE_NAME if num_shards == 1 else f"model-{shard_idx + 1:05d}-of-{num_shards:05d}.safetensors"


def _write_header(file: IO[bytes], shard: Sequence[TensorLayout], save: str | None) -> dict[str, int]:
    """Write the header and size the file; returns the file offset of each tensor."""
    metadata = {"format": "pt"} if save is None else {"format": "pt", SAVE_KEY: save}
    header: dict[str, object] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    position = 0
    for tensor in sorted(shard, key=lambda tensor: -ITEM_BYTES[tensor.dtype]):
        stop = position + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, stop]}
        starts[tensor.name] = position
        position = stop
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(struct.pack("<Q", len(raw)) + raw)
    data_start = file.tell()
    file.truncate(data_start + position)
    return {name: data_start + start for name, start in starts.items()}


def _write_tensor(file: IO[bytes], offset: int, planned: TensorLayout, tensor: Tensor) -> None:
    assert tuple(tensor.shape) == planned.shape, f"{planned=} {tensor.shape=}"
    assert tensor.dtype == DTYPES[planned.dtype], f"{planned=} {tensor.dtype=}"
    file.seek(offset)
    rows = torch.atleast_1d(tensor.detach())
    for part in rows.split(max(1, _PIECE_BYTES * len(rows) // max(1, planned.num_bytes))):
        file.write(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
