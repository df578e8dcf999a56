"""One safetensors file: its header, which is validated before any tensor is read, and its tensors.

    file = u64 little-endian header length | JSON header | tensor bytes, back to back, no holes
    header = {"__metadata__": {str: str}, name: {"dtype": "BF16", "shape": [...], "data_offsets": [start, stop]}}

Tensors are read directly into their destination, so loading needs no second copy of a shard.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.common.bounded import open_regular
from glm5.common.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
ITEM_BYTES = {code: dtype.itemsize for code, dtype in DTYPES.items()}
SAVE_KEY = "glm5_save"  # metadata of a file that is one of several shards: identifies the save
MAX_HEADER_BYTES = 100_000_000  # the limit of the format
MAX_READ_BYTES = 1 << 30  # Linux reads at most 2**31 - 4096 bytes a call


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor is stored. `start` and `stop` are byte offsets in the file; `dtype` is safetensors' code; `save`
    identifies the save that wrote the file, None if the file does not say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int
    save: str | None = None

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def read_header(path: Path) -> list[TensorEntry]:
    """All tensors of one file, in the order of their bytes. Reads the header only.

    Raises `CheckpointError` with the file's name when it is absent, truncated or not a safetensors file, or when its
    header contradicts itself or the file's size.
    """
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if prefix.startswith(b"version "):
                raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself; run: git lfs pull")
            if len(prefix) < 8 or 8 + length > size:
                raise CheckpointError(
                    f"{path}: truncated: its header alone needs {8 + length} bytes, the file has {size}; fetch it again"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: not a safetensors file (a header of {length} bytes is beyond the format)"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    entries = parse_header(raw, path.name, 8 + length, path)
    needed = max((entry.stop for entry in entries), default=8 + length)
    if needed > size:
        raise CheckpointError(
            f"{path}: truncated: its header promises {needed} bytes, the file has {size}; fetch it again"
        )
    if needed < size:
        raise CheckpointError(f"{path}: corrupt: {size - needed} bytes follow the last tensor; fetch it again")
    return entries


def parse_header(raw: bytes, file: str, data_start: int, where: object) -> list[TensorEntry]:
    """The entries of a JSON header, checked against each other; `where` names the file in errors."""
    try:
        header = json.loads(raw, object_pairs_hook=unique_keys)
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        metadata = header.pop("__metadata__", None)
        save = metadata.get(SAVE_KEY) if isinstance(metadata, dict) else None
        entries = [_entry(name, value, file, data_start, save) for name, value in header.items()]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{where}: corrupt: the header cannot be understood ({error}); fetch it again") from None
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    position = data_start
    for entry in entries:
        if entry.start != position:
            raise CheckpointError(
                f"{where}: corrupt: tensor {entry.name} leaves a hole or overlaps another; fetch it again"
            )
        position = entry.stop
    return entries


def _entry(name: str, value: Any, file: str, data_start: int, save: str | None) -> TensorEntry:
    code, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if not isinstance(code, str):
        raise ValueError(f"{name}: the dtype must be a name, got {code!r:.60}")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"{name}: shape and offsets must be whole numbers")
    if code in ITEM_BYTES and stop - start != math.prod(shape) * ITEM_BYTES[code]:
        raise ValueError(f"{name}: {stop - start} bytes for {code} of shape {list(shape)}")
    return TensorEntry(name, code, shape, file, data_start + start, data_start + stop, save)


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=)`: an object in which no key appears twice, else ValueError."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} appears twice")
        found[key] = value
    return found


def read_tensor(source: Path | Tensor, entry: TensorEntry) -> Tensor:
    """The tensor in its stored dtype: of a directory in a new host buffer, of bytes in memory (uint8, the content of
    its file) as a view of them."""
    if isinstance(source, Tensor):
        return source[entry.start : entry.stop].view(DTYPES[entry.dtype]).view(entry.shape)
    out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    read_into(source, entry, out)
    return out


def read_columns(source: Path | Tensor, entry: TensorEntry, rows: range, columns: range) -> Tensor:
    """Some rows and columns of a matrix in a new host buffer, in its stored dtype. Reads whole rows."""
    dtype, num_columns = DTYPES[entry.dtype], entry.shape[1]
    held = torch.empty((len(rows), num_columns), dtype=dtype)
    read_into(source, entry, held, first_byte=rows.start * num_columns * dtype.itemsize)
    return held[:, columns.start : columns.stop]


def mapped(directory: Path, entry: TensorEntry) -> Tensor | None:
    """The tensor as a memory map of the file; None if its offset is not aligned.

    Not for files that another process may truncate meanwhile: that would kill this process (SIGBUS).
    """
    dtype = DTYPES[entry.dtype]
    if entry.start % dtype.itemsize:
        return None
    try:
        held = np.memmap(directory / entry.file, f"u{dtype.itemsize}", "c", offset=entry.start, shape=entry.shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / entry.file}: reading {entry.name} failed: {error}") from None
    return torch.from_numpy(held).view(dtype)


def read_into(source: Path | Tensor, entry: TensorEntry, out: Tensor, first_byte: int = 0) -> None:
    """Fill the contiguous host tensor `out` with the bytes of `entry` from `first_byte` on, of a directory or of bytes
    in memory."""
    assert out.is_contiguous(), f"{out.stride()=}"
    flat = out.detach().reshape(-1).view(torch.uint8)
    assert first_byte + len(flat) <= entry.num_bytes, f"{entry=} {first_byte=} {len(flat)=}"
    if isinstance(source, Tensor):
        flat.copy_(source[entry.start + first_byte :][: len(flat)])
    else:
        _read_file(source, entry, flat.numpy().data, first_byte)


def _read_file(directory: Path, entry: TensorEntry, bytes_out: memoryview, first_byte: int) -> None:
    position = 0
    try:
        with (directory / entry.file).open("rb", buffering=0) as file:
            file.seek(entry.start + first_byte)
            while position < len(bytes_out):
                num_read = file.readinto(bytes_out[position : position + MAX_READ_BYTES])
                if not num_read:
                    raise CheckpointError(f"{directory / entry.file}: ended inside tensor {entry.name}; fetch it again")
                position += num_read
    except OSError as error:
        raise CheckpointError(
            f"{directory / entry.file}: reading {entry.name} failed: {os.strerror(error.errno or 0)}"
        ) from None
