"""Staging buffers in host memory between files and the parameters of a model.

    file -> buffer (pinned, for a GPU) -> copy, cast or dequantize on the device -> parameter

For a GPU every reader has two pinned buffers and a stream: while one buffer is copied over the bus, the reader fills
the other. On a CPU a buffer is an ordinary tensor, and copies are synchronous.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BUFFER_BYTES = 8 << 20  # of pinned memory; eight readers hold 128 MB
_CPU_ELEMENTS = 1 << 18  # cast or dequantized at a time by a reader, at about 20 bytes each


class Staging:
    """The buffers of one reader, for parameters on `device`. Use it inside `on_stream`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._current = device, 0
        self._buffers: list[Tensor] = []
        self.is_pinned = device.type == "cuda"
        if self.is_pinned:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.default_stream(device))  # the parameters were allocated on that one
            self._events = [torch.cuda.Event() for _ in range(2)]

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the reader's device work on its own stream."""
        if not self.is_pinned:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def rows(self, row_bytes: int, element_bytes: int) -> int:
        """Number of rows to read at a time."""
        max_bytes = _BUFFER_BYTES if self.is_pinned else _CPU_ELEMENTS * element_bytes
        return max(1, max_bytes // max(1, row_bytes))

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory to fill and then `submit`. Rows wider than a buffer get memory that is not pinned."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if not self.is_pinned or num_bytes > _BUFFER_BYTES:
            return torch.empty(shape, dtype=dtype)
        if not self._buffers:  # what is on the device already needs none
            self._buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._current = 1 - self._current
        self._events[self._current].synchronize()
        return self._buffers[self._current][:num_bytes].view(dtype).view(shape)

    def submit(self, buffer: Tensor, consume: Callable[[Tensor], object]) -> None:
        """Call `consume` with a copy of `buffer` on the device, without waiting for the copy."""
        if not self.is_pinned:
            consume(buffer)
            return
        consume(buffer.to(self.device, non_blocking=True))
        self._events[self._current].record(self._stream)

    def finish(self) -> None:
        """Wait until everything submitted is on the device."""
        if self.is_pinned:
            self._stream.synchronize()


class StagingPool:
    """A `Staging` for each thread."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._local, self._lock = device, threading.local(), threading.Lock()
        self._all: list[Staging] = []

    def of_this_thread(self) -> Staging:
        if (staging := getattr(self._local, "staging", None)) is None:
            staging = self._local.staging = Staging(self._device)
            with self._lock:
                self._all.append(staging)
        return staging

    def finish(self) -> None:
        for staging in self._all:
            staging.finish()
