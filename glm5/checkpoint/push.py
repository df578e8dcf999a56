"""New weights of a model in use that another process passes in memory, a bucket at a time (handover.py sends them).

    all names and shapes -> compared with the model | a bucket: sum of its bytes -> parameters, in place -> finite?

A bucket is read as a file of a checkpoint is: this rank's part of each tensor is cast, dequantized or quantized, so no
copy of the weights is ever made. For a model on a GPU the bucket is copied there as a whole, summed there, and its
tensors are taken from that copy. Parameters keep their addresses.
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from glm5.checkpoint.index import ShardIndex, counted
from glm5.checkpoint.names import slot_of
from glm5.checkpoint.pinned import Pinned
from glm5.checkpoint.shard import TensorEntry
from glm5.checkpoint.sums import checksum
from glm5.checkpoint.update import is_finite, match, parts_of
from glm5.common.errors import CheckpointError
from glm5.model.glm5 import Glm5
from glm5.parallel.table import UNSHARDED, Shard


class Push:
    """An update of `model` in `buckets`, whose files are in `directory`. `shard`: the one that the model was loaded
    with. `is_complete`: no tensor of the model is absent. `close` frees what it holds of the sender's memory.

    Raises CheckpointError when there are no tensors, or when any does not fit the model.
    """

    def __init__(
        self, model: Glm5, directory: Path, buckets: Sequence[Sequence[TensorEntry]], shard: Shard = UNSHARDED
    ) -> None:
        self._model, self._directory, self._buckets, self._shard = model, directory, buckets, shard
        bucket_of: dict[str, int] = {}
        entries: dict[str, TensorEntry] = {}
        for number, entry in ((number, entry) for number, bucket in enumerate(buckets) for entry in bucket):
            module = entry.name.rpartition(".")[0]
            if entry.name in entries or bucket_of.setdefault(module, number) != number:
                raise CheckpointError(f"the update has {entry.name} twice, or {module} in several buckets")
            entries[entry.name] = entry
        self._match = match(model, ShardIndex("the update", entries))
        self.is_complete = self._match.is_complete
        self._memory: dict[str, Pinned] = {}  # of the sender, by file; for a GPU
        self._copies: dict[int, Tensor] = {}  # buckets on the GPU that are not written yet
        self._in_use = Lock()  # the sender's memory
        self._is_closed = False

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
        current = {name: tensor.detach() for name, tensor in self._model.state_dict().items()}
        names = self._match.read_into(current, self._bytes_of(number), index, self._shard, quiet=True)
        self._copies.pop(number, None)
        bad: list[str] = []
        for name in names:
            slot = slot_of(name)
            parts = [slot._replace(parameter=part).view(current[part]) for part in parts_of(slot.parameter, current)]
            if not all(is_finite(part) for part in parts):
                bad.append(name)
        if bad:
            raise CheckpointError(f"{counted(bad, 'tensor')} of the update would hold NaN or infinity")

    def close(self) -> None:
        """Free the sender's memory and all copies, whether all buckets were written or not."""
        with self._in_use:
            self._is_closed = True
            self._copies.clear()
            while self._memory:
                self._memory.popitem()[1].close()

    def _bytes_of(self, number: int) -> Tensor:
        """The bytes of a bucket: a copy on the model's GPU if there is room for one, else the sender's memory."""
        file, num_bytes = self._buckets[number][0].file, max(entry.stop for entry in self._buckets[number])
        if self._model.device.type == "cuda":
            with suppress(torch.OutOfMemoryError), self._in_use:
                return self._copied(number, file, num_bytes)
        return torch.frombuffer(self._mapped(file), dtype=torch.uint8)[:num_bytes]

    def _copied(self, number: int, file: str, num_bytes: int) -> Tensor:
        if self._is_closed:
            raise CheckpointError("the push has ended")
        if number not in self._copies:
            if file not in self._memory:
                self._memory[file] = Pinned(self._mapped(file))
            self._copies[number] = self._memory[file].bytes[:num_bytes].to(self._model.device)
        return self._copies[number]

    def _mapped(self, file: str) -> mmap.mmap:
        descriptor = os.open(self._directory / file, os.O_RDWR)
        try:
            return mmap.mmap(descriptor, 0)  # its sender has sealed it against shrinking
        finally:
            os.close(descriptor)
