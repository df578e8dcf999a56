"""Copies from host to device without synchronization.

A copy from pageable memory may wait for all earlier work of the device.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`; on a CPU, a tensor over the same memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
