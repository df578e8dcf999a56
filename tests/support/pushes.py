"""A push of weights with both sides in one process."""

import os
from pathlib import Path

import torch

from glm5.checkpoint.handover import Buffers, TensorStream, buckets_of, stream_of
from glm5.checkpoint.push import Push, SharedMemory
from glm5.checkpoint.shard import TensorEntry
from glm5.parallel.table import UNSHARDED

HERE = Path(f"/proc/{os.getpid()}/fd")


class Sender:
    """Both sides in one process."""

    def __init__(self, model, tensors, shard=UNSHARDED):
        stream = tensors if isinstance(tensors, TensorStream) else stream_of(tensors)
        self.buckets, self.tensors = buckets_of(stream.layout), iter(stream.tensors)
        self.size = max(start + layout.num_bytes for bucket in self.buckets for layout, start in bucket)
        self.buffers = Buffers(self.size)
        entries = [
            [
                TensorEntry(layout.name, layout.dtype, layout.shape, self.file(i), start, start + layout.num_bytes)
                for layout, start in bucket
            ]
            for i, bucket in enumerate(self.buckets)
        ]
        self.push = Push(model, SharedMemory(HERE, model.device), entries, shard)

    def file(self, number: int) -> str:
        return str(self.buffers.descriptors[number % 2])

    def send(self, number: int, *, damage: bool = False) -> None:
        checksum = self.buffers.fill(number % 2, self.buckets[number], self.tensors)
        if damage:
            self.buffers._memory[number % 2][0] ^= 1
        self.push.check_sum(number, checksum)
        self.push.write(number)

    def send_all(self) -> None:
        for number in range(len(self.buckets)):
            self.send(number)
        self.buffers.close()


def same_bits(model, other) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)) for name, tensor in ours.items()
    )
