"""The GPU on which a thread launches: Triton and libraries use the thread's current one, wherever tensors lie."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Inside the block this thread's current GPU is `device`, if it is one."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def make_current(device: torch.device) -> None:
    """From now on this thread's current GPU is `device`, if it is one; "cuda" without a number already is."""
    if device.type == "cuda" and device != torch.device("cuda"):
        torch.cuda.set_device(device)
