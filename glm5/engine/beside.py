"""What a step computes beside what comes meanwhile: in a CUDA graph, on a branch of it."""

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class Beside(Generic[Result]):
    """A result that nothing waits for until it is taken, as it must be. Outside of graphs it is computed at once."""

    def __init__(self, compute: Callable[[], Result], device: torch.device):
        self._stream, self._device = None, device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._stream = _side_stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                self._result = compute()
        else:
            self._result = compute()

    def take(self) -> Result:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._result


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
