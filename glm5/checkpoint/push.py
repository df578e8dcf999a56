"""New weights of a model in use that another process passes in memory, a bucket at a time (handover.py sends them).

    all names and shapes -> compared with the model | a bucket: sum of its bytes -> parameters, in place -> finite?

A bucket is read as a file of a checkpoint is: this rank's part of each tensor is cast, dequantized or quantized through
small staging buffers, so no copy of the weights is ever made. Parameters keep their addresses.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from glm5.checkpoint.index import ShardIndex, counted
from glm5.checkpoint.names import slot_of
from glm5.checkpoint.shard import TensorEntry
from glm5.checkpoint.sums import checksum
from glm5.checkpoint.update import is_finite, match, parts_of
from glm5.common.errors import CheckpointError
from glm5.model.glm5 import Glm5
from glm5.parallel.table import UNSHARDED, Shard


class Push:
    """An update of `model` in `buckets`, whose files are in `directory`. `shard`: the one that the model was loaded
    with. `is_complete`: no tensor of the model is absent.

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

    def check_sum(self, number: int, want: int) -> None:
        """CheckpointError if the bytes of a bucket are not those that were sent, by their checksum."""
        bucket = self._buckets[number]
        path, num_bytes = self._directory / bucket[0].file, max(entry.stop for entry in bucket)
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))[:num_bytes]
        if checksum(data) != want:
            raise CheckpointError(
                f"bucket {number + 1} of {len(self._buckets)}, from {bucket[0].name} on, arrived with a wrong checksum"
            )

    @torch.no_grad()
    def write(self, number: int) -> None:
        """Write a bucket into the parameters. No step may run. CheckpointError if they then hold NaN or infinity."""
        index = ShardIndex("the update", {entry.name: entry for entry in self._buckets[number]})
        current = {name: tensor.detach() for name, tensor in self._model.state_dict().items()}
        names = self._match.read_into(current, self._directory, index, self._shard, quiet=True)
        bad: list[str] = []
        for name in names:
            slot = slot_of(name)
            parts = [slot._replace(parameter=part).view(current[part]) for part in parts_of(slot.parameter, current)]
            if not all(is_finite(part) for part in parts):
                bad.append(name)
        if bad:
            raise CheckpointError(f"{counted(bad, 'tensor')} of the update would hold NaN or infinity")
