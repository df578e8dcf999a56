"""store_rows on a CPU: NumPy assigns to the pool's own memory, in half the time where rows are few."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.kernels.fp8_pool import Pool

Where = tuple[NDArray[np.int64], NDArray[np.int64]]  # page and offset of each row


def refusal(pool_PZX: Pool, slot_T: Tensor) -> str | None:
    """Why these tensors cannot be handled; None if they can."""
    if not isinstance(pool_PZX, Tensor):
        return "needs a plain pool, got FP8"
    if not (pool_PZX.is_cpu and slot_T.is_cpu):
        return f"needs tensors in host memory, got {pool_PZX.device}"
    return None


def store_rows(pool_PZX: Pool, slot_T: Tensor, row_TX: Tensor) -> None:
    """As `reference.store_rows`. Raises ValueError where `refusal` has a reason."""
    if reason := refusal(pool_PZX, slot_T):
        raise ValueError(f"store_rows[in_place] {reason}; use impl='reference'")
    assert isinstance(pool_PZX, Tensor)
    write_rows(as_array(pool_PZX), np.divmod(slot_T.numpy(), pool_PZX.shape[1]), row_TX.to(pool_PZX.dtype))


def write_rows(pool_PZX: NDArray[Any], where: Where, row_TX: Tensor) -> None:
    """The same for a pool that `as_array` made, and rows of its type."""
    pool_PZX[where] = as_array(row_TX)


def as_array(values: Tensor) -> NDArray[Any]:
    """A NumPy view of the tensor's memory; bfloat16, which NumPy lacks, is viewed as int16."""
    values = values.detach()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
