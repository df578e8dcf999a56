"""Versions of weights in a folder that a trainer shares with its engines: whole, or what has changed since the last.

    FOLDER/00000013-1f0e9a52/00000.safetensors   by names on disk, a file for each bucket (handover.py)
    FOLDER/00000013-1f0e9a52/version.json        written last: what is complete, of which base, with sums of all bytes

The folder of a version gets its name once it is complete, and an engine is given the path of its version.json, without
which it reads nothing. It holds `id`, of these weights; `base`, the id of those that the changes are to, or null;
the size and the checksum of each file; and of each changed tensor the checksum that it then has. An engine that holds
other weights than `base` refuses the changes, and is sent the whole.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Protocol
from uuid import uuid4

import msgspec
import torch
from torch import Tensor

from glm5.checkpoint.changes import Change, changed
from glm5.checkpoint.dtypes import cast
from glm5.checkpoint.fit import ROTATIONS
from glm5.checkpoint.handover import TensorStream, buckets_of, stream_of
from glm5.checkpoint.index import ShardIndex, counted, merge
from glm5.checkpoint.names import slot_of
from glm5.checkpoint.shard import CODES, TensorEntry, read_header, read_tensor
from glm5.checkpoint.sums import checksum
from glm5.checkpoint.update import Staged, is_finite, stage
from glm5.checkpoint.writer import TensorLayout, write_file
from glm5.common.atomic import atomic_dir, atomic_write, sweep
from glm5.common.bounded import TABLES, read_bounded
from glm5.common.errors import CheckpointError
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import FP8
from glm5.model.glm5 import Glm5
from glm5.parallel.table import UNSHARDED, Shard, span_of

MARKER = "version.json"
_GAPS = ".gaps"
_OURS = re.compile(r"\d{8,}-[0-9a-f]{8}")


class _Marker(msgspec.Struct):
    version: int
    id: str
    base: str | None
    files: dict[str, tuple[int, int]]  # bytes, checksum
    sums: dict[str, int]  # of changed tensors, if there is a base


class WeightFiles(Protocol):
    """Versions as `WeightFolder` has them, which another process may write. `num_bytes`: of the last one."""

    num_bytes: int

    def publish(self, tensors: Any, version: int) -> Path: ...
    def whole(self) -> Path: ...
    def clear(self) -> None: ...


def clear(folder: Path) -> None:
    """Delete all versions in a folder."""
    if folder.is_dir():
        sweep(folder)
        for one in folder.iterdir():
            if _OURS.fullmatch(one.name):
                shutil.rmtree(one, ignore_errors=True)


class WeightFolder:
    """The sender's side. `folder` is its alone: versions of an earlier sender are deleted. `deltas`: send what has
    changed, for which a copy of the weights is kept in host memory. Raises CheckpointError where it cannot write."""

    def __init__(self, folder: Path, *, deltas: bool) -> None:
        self.folder, self.deltas = folder, deltas
        self.num_bytes = 0  # of the last version
        self._version, self._id = -1, ""
        self._held: dict[str, Tensor] | None = None  # what the last version has
        self._whole: Path | None = None  # of the last version
        self._kept: list[tuple[int, Path]] = []
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Delete all versions."""
        clear(self.folder)

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> Path:
        """Write a version; the path of its marker. Tensors are as for `stream_of`. The same number again means weights
        that some engine lacks, and is whole."""
        with self._lock:
            if version < self._version:
                raise CheckpointError(f"version {version} was asked for after version {self._version}")
            stream, base = stream_of(tensors), self._id if version > self._version else None
            before, self._held, self._whole = self._held, None, None  # until this one is complete
            held: dict[str, Tensor] = {} if before is None else before
            self._id = uuid4().hex
            if before is None or base is None:
                path = self._whole = self._written(version, stream, None, held)
            else:
                path = self._written(version, stream, base, held)
            self._held = held if self.deltas else None
            for old, kept in [one for one in self._kept if one[0] < self._version]:
                shutil.rmtree(kept, ignore_errors=True)
                self._kept.remove((old, kept))
            self._version = version
            return path

    def whole(self) -> Path:
        """The marker of the last version as a whole, for an engine with another base."""
        with self._lock:
            if self._whole is None:
                assert self._held is not None, "nothing was published"
                self._whole = self._written(self._version, stream_of(self._held), None, self._held)
            return self._whole

    def _written(self, version: int, stream: TensorStream, base: str | None, held: dict[str, Tensor]) -> Path:
        """`held`: the tensors of the base, which become those of this version."""
        target = self.folder / f"{version:08d}-{uuid4().hex[:8]}"
        marker, tensors = _Marker(version, self._id, base, {}, {}), iter(stream.tensors)
        try:
            with atomic_dir(target) as building:
                for number, bucket in enumerate(buckets_of(stream.layout)):
                    found = dict(self._taken(bucket, tensors, held, marker))
                    if not found:
                        continue
                    layout = [TensorLayout(name, CODES[one.dtype], tuple(one.shape)) for name, one in found.items()]
                    path = building / f"{number:05d}.safetensors"
                    for _ in write_file(path, layout, iter(found.values())):
                        pass
                    marker.files[path.name] = _sum_of(path)
                with atomic_write(building / MARKER, "wb") as handle:
                    handle.write(msgspec.json.encode(marker))
        except OSError as error:
            raise CheckpointError(f"{target}: weights cannot be written there: {error.strerror or error}") from error
        self._kept.append((version, target))
        self.num_bytes = sum(size for size, _ in marker.files.values())
        return target / MARKER

    def _taken(
        self,
        bucket: list[tuple[TensorLayout, int]],
        tensors: Iterator[Tensor],
        held: dict[str, Tensor],
        marker: _Marker,
    ) -> Iterator[tuple[str, Tensor]]:
        """What is written of a bucket, by its names."""
        for layout, _ in bucket:
            new = next(tensors).detach().cpu().contiguous()
            if marker.base is None:
                yield layout.name, new
            elif (found := changed(held[layout.name], new)) is not None:
                gaps, values = found
                marker.sums[layout.name] = _sum(new)
                yield layout.name, values
                if gaps is not None:
                    yield layout.name + _GAPS, gaps
            if self.deltas:
                held.setdefault(layout.name, torch.empty_like(new)).copy_(new)


def stage_version(path: Path, model: Glm5, held: tuple[int, str | None], shard: Shard = UNSHARDED) -> Staged:
    """Read and check a version without changing the model, as `stage` does. `path`: of its marker. `held`: number and
    id of the weights in use, no id if they came otherwise.

    Raises `CheckpointError` for what is not complete, damaged or older than the weights in use, does not fit the model,
    or has another base.
    """
    marker, folder = _marker(path), path.parent
    if marker.version <= held[0]:
        raise CheckpointError(f"{path} holds version {marker.version}, and version {held[0]} is in use")
    if marker.base not in (None, held[1]):
        raise CheckpointError(f"{path} holds changes to other weights than those in use; send all of them")
    for name, want in marker.files.items():
        if "/" in name or _sum_of(folder / name) != want:
            raise CheckpointError(f"{folder / name} is damaged: its size or checksum is not what {MARKER} says")
    problems: list[str] = []
    headers = {name: read_header(folder / name) for name in marker.files}
    index = merge(str(folder), list(headers), headers, None, problems)
    if marker.base is None:
        return stage(model, folder, shard, index, marker.id)
    return Staged({}, is_complete=False, changes=_changes(index, marker, folder, model, shard), id=marker.id)


@torch.no_grad()
def _changes(index: ShardIndex, marker: _Marker, folder: Path, model: Glm5, shard: Shard) -> dict[str, Change]:
    current = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    shapes, entries = {spec.name: spec.shape for spec in tensor_specs(model.cfg)}, dict(index.entries)
    gaps = {name: entries.pop(name + _GAPS) for name in marker.sums if name + _GAPS in entries}
    changes: dict[str, Change] = {}
    if index.problems:
        raise CheckpointError("; ".join(index.problems))
    if bad := sorted((entries.keys() ^ marker.sums.keys()) | (entries.keys() - shapes.keys())):
        raise CheckpointError(f"{folder}: {counted(bad, 'tensor')} not of the model or not among its sums")
    for name, entry in entries.items():
        slot = slot_of(name)
        whole = current.get(slot.parameter)
        if whole is None or not whole.is_floating_point() or whole.dtype == FP8 or name.endswith(ROTATIONS):
            raise CheckpointError(f"{folder}: {name} is held in a format that takes no changes; send all of it")
        values = read_tensor(folder, entry)
        own = read_tensor(folder, gaps[name]) if name in gaps else None
        change = changes[name] = Change(own, values, shapes[name], span_of(name, shapes[name], shard))
        part = slot.view(whole)
        if not is_finite(cast(values, part.dtype)):
            raise CheckpointError(f"{folder}: {name} would hold NaN or infinity; nothing was replaced")
        if change.span is None and part.dtype == values.dtype:
            new = part.clone()
            change.write_into(new)
            if _sum(new) != marker.sums[name]:
                raise CheckpointError(f"{folder}: {name} would have a wrong checksum; send all weights")
    return changes


def _marker(path: Path) -> _Marker:
    try:
        return msgspec.json.decode(read_bounded(path, TABLES), type=_Marker)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: absent, so these weights are not complete") from None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _sum(tensor: Tensor) -> int:
    return checksum(tensor.reshape(-1).view(torch.uint8))


def _sum_of(path: Path) -> tuple[int, int]:
    """Size and checksum of a file. Raises CheckpointError."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    return size, checksum(read_tensor(path.parent, TensorEntry("", "U8", (size,), path.name, 0, size)))
