"""Tensors in memory -> buckets in shared memory that an engine's processes read (push.py is their side).

    tensors -> buckets of at most a layer -> sum of a bucket's bytes -> one of two buffers, in turn

While the engine reads one buffer, the other is filled. For tensors on a GPU they are pinned. The buffers have no name
in any folder: the engine opens them by this process's number, and they are gone when it ends, however it ends.
Between GPUs buckets need no host memory (broadcaster.py).
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glm5.checkpoint.names import SCALE_SUFFIX, STACKED, place_of
from glm5.checkpoint.pinned import Pinned
from glm5.checkpoint.shard import CODES, DTYPES
from glm5.checkpoint.sums import checksum
from glm5.checkpoint.update import is_finite
from glm5.checkpoint.writer import TensorLayout
from glm5.common import host_memory
from glm5.common.errors import CheckpointError

MAX_BUCKET_BYTES = 1 << 28  # of several modules; a layer of GLM-5 has 20 GB in bfloat16
_ALIGNMENT = 64
NUM_BUFFERS = 2

Bucket = Sequence[tuple[TensorLayout, int]]
"""Tensors that are sent together, each with its first byte."""


Place = tuple[int, tuple[int, int], tuple[str, int] | None]
"""Where an engine finds buckets: a process and its file descriptors of two buffers; or host and port of a broadcast."""


class Channel(Protocol):
    """How buckets reach an engine. Each is filled, and then sent."""

    @property
    def place(self) -> Place: ...
    def fill(self, which: int, bucket: Bucket, tensors: Iterator[Tensor]) -> int: ...
    def send(self, is_wanted: Callable[[], bool]) -> None: ...
    def close(self) -> None: ...


class Channels(Protocol):
    """Makes channels in the process that has the tensors."""

    def buffers(self, num_bytes: int) -> Channel: ...
    def broadcaster(self, num_ranks: int, device: torch.device, *, beyond: bool) -> Channel:
        """`beyond`: to another machine."""
        ...


@dataclass(frozen=True)
class TensorStream:
    """Tensors with their names on disk, made one by one in the order of `layout`. Those of a module, such as a weight
    and its scales, are neighbours. `device`: of all of them, where that is known. `channels`: of the process that has
    the tensors, where it is another one; `tensors` are then none."""

    layout: Sequence[TensorLayout]
    tensors: Iterable[Tensor]
    device: torch.device | None = None
    channels: Channels | None = None


def stream_of(tensors: Mapping[str, Tensor]) -> TensorStream:
    """Tensors by their names on disk, or by those of the model's `state_dict`, in which experts are stacked.

    Raises CheckpointError when there are none, when a dtype cannot be stored, and for NaN and infinity.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"weights hold {name!r:.60}: {tensor!r:.60}; allowed: tensors by name")
    by_unit: dict[tuple[int, str], list[tuple[str, Tensor]]] = {}
    for name, tensor in _on_disk(tensors):
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{name} is {tensor.dtype}; allowed: {', '.join(str(dtype) for dtype in CODES)}")
        if not is_finite(tensor):
            raise CheckpointError(f"{name} holds NaN or infinity; nothing was replaced")
        by_unit.setdefault(_unit(name), []).append((name, tensor))
    if not by_unit:
        raise CheckpointError("no tensors were given to update the weights with")
    first: dict[int, int] = {}
    for number, (layer_idx, _) in enumerate(by_unit):
        first.setdefault(layer_idx, number)
    parts = [part for unit in sorted(by_unit, key=lambda unit: first[unit[0]]) for part in by_unit[unit]]
    layout = [TensorLayout(name, CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in parts]
    devices = {tensor.device for _, tensor in parts}
    return TensorStream(layout, (tensor for _, tensor in parts), devices.pop() if len(devices) == 1 else None)


def buckets_of(layout: Sequence[TensorLayout]) -> list[list[tuple[TensorLayout, int]]]:
    """Buckets, each of one layer, and beyond `MAX_BUCKET_BYTES` only of one module."""
    buckets: list[list[tuple[TensorLayout, int]]] = []
    last, stop = None, 0
    for tensor in layout:
        unit = _unit(tensor.name)
        is_full = unit != last and stop + tensor.num_bytes > MAX_BUCKET_BYTES
        if last is None or unit[0] != last[0] or is_full:
            buckets.append([])
            stop = 0
        buckets[-1].append((tensor, stop))
        last, stop = unit, -(-(stop + tensor.num_bytes) // _ALIGNMENT) * _ALIGNMENT
    return buckets


class Buffers:
    """Two buffers of `num_bytes` each in shared memory. Raises CheckpointError when there is not enough memory."""

    def __init__(self, num_bytes: int) -> None:
        free = host_memory.available()
        if NUM_BUFFERS * num_bytes > free:
            raise CheckpointError(
                f"weights go to the engine through {NUM_BUFFERS} buffers of {num_bytes:,} bytes each, and the host has "
                f"{free:,} bytes of memory; free some"
            )
        self.descriptors: list[int] = []
        self._memory: list[mmap.mmap] = []
        for _ in range(NUM_BUFFERS):
            descriptor = os.memfd_create("glm5-push", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.descriptors.append(descriptor)
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # the engine maps it
            self._memory.append(mmap.mmap(descriptor, num_bytes))
        self.place: Place = os.getpid(), (self.descriptors[0], self.descriptors[1]), None
        is_for_gpu = torch.cuda.is_initialized()
        self._pinned = [Pinned(memory) for memory in self._memory] if is_for_gpu else []

    @torch.no_grad()
    def fill(self, which: int, bucket: Bucket, tensors: Iterator[Tensor]) -> int:
        """Copy the next tensors into a buffer, as the bucket says. Returns the checksum of its bytes. Those of a GPU
        are put together and summed there, if it has room."""
        given = next_of(tensors, bucket)
        memory = torch.frombuffer(self._memory[which], dtype=torch.uint8)[: size_of(bucket)]
        if given[0].is_cuda:
            with suppress(torch.OutOfMemoryError):
                together = torch.empty_like(memory, device=given[0].device)
                put(together, bucket, given)
                memory.copy_(together)
                return checksum(together)
        put(memory, bucket, given)
        return checksum(memory)

    def send(self, is_wanted: Callable[[], bool]) -> None:
        """The engine reads it by itself."""

    def close(self) -> None:
        """The memory is free once no process reads it any more."""
        while self._pinned:
            self._pinned.pop().close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        self._memory.clear()


def size_of(bucket: Bucket) -> int:
    """Its bytes."""
    layout, start = bucket[-1]
    return start + layout.num_bytes


def next_of(tensors: Iterator[Tensor], bucket: Bucket) -> list[Tensor]:
    """The tensors of a bucket. Raises CheckpointError where others come, or none."""
    found: list[Tensor] = []
    for layout, _ in bucket:
        tensor = next(tensors, None)
        if tensor is None:
            raise CheckpointError(f"the tensors ended before {layout.name}")
        if (tuple(tensor.shape), CODES.get(tensor.dtype)) != (layout.shape, layout.dtype):
            raise CheckpointError(f"{layout.name} is {tensor.dtype} {list(tensor.shape)}, announced: {layout}")
        found.append(tensor)
    return found


def put(memory: Tensor, bucket: Bucket, tensors: Sequence[Tensor]) -> None:
    """Copy the tensors of a bucket to their places in `memory` (uint8)."""
    for (layout, start), tensor in zip(bucket, tensors, strict=True):
        stop = start + layout.num_bytes
        memory[start:stop].view(DTYPES[layout.dtype]).view(layout.shape).copy_(tensor)


def _unit(name: str) -> tuple[int, str]:
    """The layer of a tensor, and the module whose tensors are read together."""
    # One rotation of the MTP layer is stored as a product with the other.
    return place_of(name).layer_idx, name.rpartition(".")[0].replace("chained_rotation", "hidden_rotation")


def _on_disk(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their names on disk; stacked experts are split into the projections of each expert."""
    for name, tensor in tensors.items():
        experts, _, leaf = name.rpartition(".")
        scale = SCALE_SUFFIX if leaf.endswith(SCALE_SUFFIX) else ""
        parts = [key for key, (parameter, _, _) in STACKED.items() if parameter == leaf.removesuffix(SCALE_SUFFIX)]
        if not experts.endswith(".mlp.experts") or not parts:
            yield name, tensor
            continue
        for expert, stacked in enumerate(tensor):
            for projection in parts:
                _, part, num_parts = STACKED[projection]
                yield f"{experts}.{expert}.{projection}.weight{scale}", stacked.chunk(num_parts)[part]
