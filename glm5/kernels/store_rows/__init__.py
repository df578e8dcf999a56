"""Writing keys into a page pool."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.store_rows.in_place import refusal
from glm5.kernels.store_rows.in_place import store_rows as _in_place
from glm5.kernels.store_rows.reference import store_rows as _reference
from glm5.kernels.triton_support import chosen


def store_rows(
    pool_PZX: Pool,
    slot_T: Tensor,
    row_TX: Tensor,
    *,
    impl: Literal["auto", "reference", "in_place", "triton"] = "auto",
) -> None:
    """Write row t, in the pool's format, to slot_T[t] (int64, page * Z + offset). Mutates the pool only.

    Where several rows have one slot, one of them is found there afterwards. No gradient passes. `in_place`: on a CPU,
    to a plain pool. `triton`: on a GPU; of FP8 rows that have one slot, parts of several may be found.
    """
    if impl == "auto" and chosen(row_TX.detach()):
        impl = "triton"
    if impl == "auto":
        impl = "in_place" if refusal(pool_PZX, slot_T) is None else "reference"
    if impl == "reference":
        _reference(pool_PZX, slot_T, row_TX)
    elif impl == "in_place":
        _in_place(pool_PZX, slot_T, row_TX)
    elif impl == "triton":
        from glm5.kernels.store_rows.triton import store_rows as run

        run(pool_PZX, slot_T, row_TX)
    else:
        raise unknown_impl("store_rows", impl, ("reference", "in_place", "triton"))
