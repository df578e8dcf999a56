"""Writing keys into a page pool."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.store_rows.reference import store_rows as _reference


def store_rows(pool_PZX: Pool, slot_T: Tensor, row_TX: Tensor, *, impl: Literal["auto", "reference"] = "auto") -> None:
    """Write row t, in the pool's format, to slot_T[t] (int64, page * Z + offset). Mutates the pool only.

    Where several rows have one slot, one of them is found there afterwards. No gradient passes.
    """
    if impl in ("auto", "reference"):
        _reference(pool_PZX, slot_T, row_TX)
        return
    raise unknown_impl("store_rows", impl, ("reference",))
