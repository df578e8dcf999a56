"""Buckets of a push by a collective, straight from the trainer's GPU to those of the engine's ranks (by gloo on CPUs).

    tensors -> a bucket on the sender's device -> sum of its bytes -> broadcast -> each rank's device -> sum

Beside handover.py, whose buffers in host memory serve all other pairs of devices.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from glm5.checkpoint.handover import Bucket, Buffers, Place, next_of, put, size_of
from glm5.checkpoint.sums import checksum
from glm5.common.errors import CheckpointError
from glm5.parallel.broadcast import BroadcastGroup
from glm5.parallel.rendezvous import LOOPBACK, Rendezvous, store_at

LIMIT_SECONDS = 60.0
"""For the other processes to join, and for each bucket."""


class OwnChannels:
    """Channels of this process (`handover.Channels`)."""

    def buffers(self, num_bytes: int) -> Buffers:
        return Buffers(num_bytes)

    def broadcaster(self, num_ranks: int, device: torch.device, *, beyond: bool) -> "Broadcaster":
        return Broadcaster(num_ranks, device, beyond=beyond)


class Broadcaster:
    """The sender's side, for pushes to one engine of `num_ranks` ranks until one fails. Tensors are put together on
    `device`. `beyond`: the engine is on another machine."""

    def __init__(self, num_ranks: int, device: torch.device, *, beyond: bool = False) -> None:
        rendezvous, self._size = Rendezvous(beyond=beyond), num_ranks + 1
        self._device, self._beyond = device, beyond
        self.place: Place = 0, (0, 0), (rendezvous.host, rendezvous.port)
        self._store = rendezvous.open(self._size)
        self._group: BroadcastGroup | None = None
        self._bucket: Tensor | None = None

    @torch.no_grad()
    def fill(self, which: int, bucket: Bucket, tensors: Iterator[Tensor]) -> int:
        """Put the next tensors together, as the bucket says; `which` has no meaning. Returns the checksum. Raises
        CheckpointError where the device has no room."""
        given = next_of(tensors, bucket)
        self._bucket = _room(size_of(bucket), self._device)
        put(self._bucket, bucket, given)
        return checksum(self._bucket)

    def send(self, is_wanted: Callable[[], bool]) -> None:
        """Broadcast it. Raises GlmError where the engine has ended or does not receive, or `is_wanted` is false."""
        assert self._bucket is not None, "nothing was put together"
        if self._group is None:
            given = {"timeout_s": LIMIT_SECONDS, "is_wanted": is_wanted, "beyond": self._beyond}
            self._group = BroadcastGroup(self._store, 0, self._size, self._device, **given)
        self._group.broadcast(self._bucket, is_wanted)
        self._bucket = None

    def close(self) -> None:
        """Closing again does nothing."""
        self._bucket = None
        if self._group is not None:
            self._group.close()


class Receiver:
    """The side of the engine's rank `rank` of `num_ranks`, which meets the sender at `address`, host and port."""

    def __init__(self, address: tuple[str, int], rank: int, num_ranks: int, device: torch.device) -> None:
        self.address, self._rank, self._size, self._device = address, rank, num_ranks + 1, device
        self._group: BroadcastGroup | None = None
        self._received: dict[int, Tensor] = {}

    def bytes_of(self, number: int, file: str, num_bytes: int) -> Tensor:
        """The bytes of a bucket, which the first call for it receives. `file` has no meaning. Raises GlmError where the
        sender has ended, and CheckpointError where the device has no room."""
        if number not in self._received:
            if self._group is None:
                host, port = self.address
                store, beyond = store_at(port, self._size, host), host != LOOPBACK
                given = {"timeout_s": LIMIT_SECONDS, "beyond": beyond}
                self._group = BroadcastGroup(store, self._rank + 1, self._size, self._device, **given)
            received = _room(num_bytes, self._device)
            self._group.broadcast(received)
            self._received[number] = received
        return self._received[number]

    def drop(self, number: int) -> None:
        """A bucket that is written."""
        self._received.pop(number, None)

    def end(self, *, failed: bool) -> None:
        """A push has ended. After one that failed the next needs another receiver."""
        self._received.clear()
        if failed and self._group is not None:
            self._group.close()


def _room(num_bytes: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(
            f"{device} has no room for a bucket of {num_bytes:,} bytes; push through host memory: channel 'memory'"
        ) from error
