"""Measures the seconds that work takes on its device, without synchronising while it runs."""

import time
from typing import Any, Self

import torch


class DeviceTimer:
    """`with timer: ...`, then `timer.seconds()`, which waits for the work on a GPU."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def __enter__(self) -> Self:
        self._marks = [self._mark()]
        return self

    def __exit__(self, *_error: object) -> None:
        self._marks.append(self._mark())

    def seconds(self) -> float:
        """Seconds of the last block; 0 before the first."""
        if len(self._marks) < 2:
            return 0.0
        first, last = self._marks
        if not self._on_gpu:
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
