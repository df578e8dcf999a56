"""New weights of a model in use that another process sends a bucket at a time, by handover.py or broadcaster.py.

    all names and shapes -> compared with the model | a bucket: sum of its bytes -> parameters, in place -> finite?

A bucket is read as a file of a checkpoint is: this rank's part of each tensor is cast, dequantized or quantized, so no
copy of the weights is ever made. For a model on a GPU the whole bucket is brought there, summed there, and its tensors
are taken from that copy. Parameters keep their addresses.
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from glm5.checkpoint.index import ShardIndex, counted
from glm5.checkpoint.names import slot_of
from glm5.checkpoint.pinned import Pinned
from glm5.checkpoint.shard import TensorEntry
from glm5.checkpoint.sums import checksum
from glm5.checkpoint.update import all_finite, is_finite, match, parts_of
from glm5.common.errors import CheckpointError
from glm5.model.glm5 import Glm5
from glm5.parallel.table import UNSHARDED, Shard


class Source(Protocol):
    """Where the bytes of buckets come from."""

    def bytes_of(self, number: int, file: str, num_bytes: int) -> Tensor:
        """Bucket `number`, in one dimension of uint8, from `file`; again until it is dropped."""
        ...

    def drop(self, number: int) -> None: ...

    def end(self, *, failed: bool) -> None: ...


class SharedMemory:
    """The sender's buffers, files of `directory`: for a model on a GPU, copies there if there is room for them."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory, self._device = directory, device
        self._pinned: dict[str, Pinned] = {}  # by file; for a GPU
        self._copies: dict[int, Tensor] = {}  # buckets on the GPU that are not written yet
        self._in_use = Lock()  # the sender's memory
        self._has_ended = False

    def bytes_of(self, number: int, file: str, num_bytes: int) -> Tensor:
        """See `Source`."""
        if self._device.type == "cuda":
            with suppress(torch.OutOfMemoryError), self._in_use:
                return self._copied(number, file, num_bytes)
        return torch.frombuffer(self._mapped(file), dtype=torch.uint8)[:num_bytes]

    def drop(self, number: int) -> None:
        """Free the copy."""
        self._copies.pop(number, None)

    def end(self, *, failed: bool) -> None:
        """Free the sender's memory and all copies, whether all buckets were written or not."""
        with self._in_use:
            self._has_ended = True
            self._copies.clear()
            while self._pinned:
                self._pinned.popitem()[1].close()

    def _copied(self, number: int, file: str, num_bytes: int) -> Tensor:
        if self._has_ended:
            raise CheckpointError("the push has ended")
        if number not in self._copies:
            if file not in self._pinned:
                self._pinned[file] = Pinned(self._mapped(file))
            self._copies[number] = self._pinned[file].bytes[:num_bytes].to(self._device)
        return self._copies[number]

    def _mapped(self, file: str) -> mmap.mmap:
        descriptor = os.open(self._directory / file, os.O_RDWR)
        try:
            return mmap.mmap(descriptor, 0)  # its sender has sealed it against shrinking
        finally:
            os.close(descriptor)


class Push:
    """An update of `model` in `buckets`, whose bytes `source` gives. `shard`: the one that the model was loaded with.
    `is_complete`: no tensor of the model is absent.

    Raises CheckpointError when there are no tensors, or when any does not fit the model.
    """

    def __init__(
        self, model: Glm5, source: Source, buckets: Sequence[Sequence[TensorEntry]], shard: Shard = UNSHARDED
    ) -> None:
        self.source, self._buckets, self._shard = source, buckets, shard
        bucket_of: dict[str, int] = {}
        entries: dict[str, TensorEntry] = {}
        for number, entry in ((number, entry) for number, bucket in enumerate(buckets) for entry in bucket):
            module = entry.name.rpartition(".")[0]
            if entry.name in entries or bucket_of.setdefault(module, number) != number:
                raise CheckpointError(f"the update has {entry.name} twice, or {module} in several buckets")
            entries[entry.name] = entry
        self._current = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self._match = match(model, ShardIndex("the update", entries))
        self.is_complete = self._match.is_complete

    def check_sum(self, number: int, want: int) -> None:
        """CheckpointError if the bytes of a bucket are not those that were sent, by their checksum."""
        if checksum(self._bytes_of(number)) != want:
            bucket = self._buckets[number]
            raise CheckpointError(
                f"bucket {number + 1} of {len(self._buckets)}, from {bucket[0].name} on, arrived with a wrong checksum"
            )

    @torch.no_grad()
    def write(self, number: int) -> None:
        """Write a bucket into the parameters. No step may run. CheckpointError if they then hold NaN or infinity."""
        index = ShardIndex("the update", {entry.name: entry for entry in self._buckets[number]})
        names = self._match.read_into(self._current, self._bytes_of(number), index, self._shard, quiet=True)
        self.source.drop(number)
        parts = {name: self._parts_of(name) for name in names}
        if all_finite([part for each in parts.values() for part in each]):
            return
        if bad := [name for name, each in parts.items() if not all(map(is_finite, each))]:
            raise CheckpointError(f"{counted(bad, 'tensor')} of the update would hold NaN or infinity")

    def _parts_of(self, name: str) -> list[Tensor]:
        slot = slot_of(name)
        keys = parts_of(slot.parameter, self._current)
        return [slot._replace(parameter=key).view(self._current[key]) for key in keys]

    def _bytes_of(self, number: int) -> Tensor:
        bucket = self._buckets[number]
        return self.source.bytes_of(number, bucket[0].file, max(entry.stop for entry in bucket))
