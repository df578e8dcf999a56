"""The GPU on which a thread launches: Triton and libraries use the thread's current one, wherever tensors lie."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Inside the block this thread's current GPU is `device`, if it is one."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield
