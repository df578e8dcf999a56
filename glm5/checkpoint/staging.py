"""What lies between files and a model's parameters: host memory that readers fill by turns.

    file -> room (pinned, of a GPU) -> copy, cast or dequantize on the device -> parameter

For a GPU every reader has two rooms of pinned memory and a stream: while one room is copied over the bus, it reads
into the other. On a CPU a room is a tensor like any other, and what is sent has arrived.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_ROOM_BYTES = 8 << 20  # of pinned memory; eight readers hold 128 MB
CPU_ELEMENTS = 1 << 18  # that a reader casts or dequantizes at a time, which takes some 20 bytes of each


class Staging:
    """Of one reader, for parameters on `device`. To be used within `turn`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._which = device, 0
        self._rooms: list[Tensor] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.default_stream(device))  # whose memory the parameters took
            self._rooms = [torch.empty(_ROOM_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._sent = [torch.cuda.Event() for _ in range(2)]

    @property
    def is_pinned(self) -> bool:
        return bool(self._rooms)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Whatever a reader computes on the device is part of its own stream."""
        if not self.is_pinned:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def rows(self, row_bytes: int, element_bytes: int) -> int:
        """How many rows are read at a time."""
        most = _ROOM_BYTES if self.is_pinned else CPU_ELEMENTS * element_bytes
        return max(1, most // max(1, row_bytes))

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory to fill; it is given back by `send`. Rows that are wider than a room are not pinned."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if not self.is_pinned or num_bytes > _ROOM_BYTES:
            return torch.empty(shape, dtype=dtype)
        self._which = 1 - self._which
        self._sent[self._which].synchronize()
        return self._rooms[self._which][:num_bytes].view(dtype).view(shape)

    def send(self, room: Tensor, take: Callable[[Tensor], object]) -> None:
        """`take` what is in the room, on the device. The host does not wait for it."""
        if not self.is_pinned:
            take(room)
            return
        take(room.to(self.device, non_blocking=True))
        self._sent[self._which].record(self._stream)

    def finish(self) -> None:
        """Everything sent has arrived."""
        if self.is_pinned:
            self._stream.synchronize()


class Stagings:
    """One for each thread that asks."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._local, self._lock = device, threading.local(), threading.Lock()
        self._all: list[Staging] = []

    def mine(self) -> Staging:
        if (staging := getattr(self._local, "staging", None)) is None:
            staging = self._local.staging = Staging(self._device)
            with self._lock:
                self._all.append(staging)
        return staging

    def finish(self) -> None:
        for staging in self._all:
            staging.finish()
