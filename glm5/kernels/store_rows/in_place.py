"""store_rows on a CPU: NumPy assigns to the pool's own memory, in half the time where rows are few."""

import numpy as np
import torch
from torch import Tensor

from glm5.kernels.dispatch import without_gradient
from glm5.kernels.fp8_pool import Pool


def refusal(pool_PZX: Pool, slot_T: Tensor) -> str | None:
    """Why these tensors cannot be handled; None if they can."""
    if not isinstance(pool_PZX, Tensor):
        return "needs a plain pool, got FP8"
    if not (pool_PZX.is_cpu and slot_T.is_cpu):
        return f"needs tensors in host memory, got {pool_PZX.device}"
    return None


@without_gradient
def store_rows(pool_PZX: Pool, slot_T: Tensor, row_TX: Tensor) -> None:
    """As `reference.store_rows`. Raises ValueError where `refusal` has a reason."""
    if reason := refusal(pool_PZX, slot_T):
        raise ValueError(f"store_rows[in_place] {reason}; use impl='reference'")
    assert isinstance(pool_PZX, Tensor)
    row_TX = row_TX.detach().to(pool_PZX.dtype)
    if pool_PZX.dtype == torch.bfloat16:  # NumPy has no such type, and need not know it
        pool_PZX, row_TX = pool_PZX.view(torch.int16), row_TX.view(torch.int16)
    pages_T, offsets_T = np.divmod(slot_T.numpy(), pool_PZX.shape[1])
    pool_PZX.numpy()[pages_T, offsets_T] = row_TX.numpy()
