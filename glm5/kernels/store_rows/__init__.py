"""Writing keys into a page pool."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.store_rows.in_place import refusal

TABLE = Table(
    __name__,
    triton=Impl("one launch, FP8 rows quantized on their way", on="triton"),
    in_place=Impl(
        "NumPy, to a plain pool", on="cpu", when=lambda _, pool_PZX, slot_T: refusal(pool_PZX, slot_T) is None
    ),
    reference=Impl("the definition"),
)


def store_rows(
    pool_PZX: Pool,
    slot_T: Tensor,
    row_TX: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Write row t, in the pool's format, to slot_T[t] (int64, page * Z + offset). Mutates the pool only.

    If several rows have the same slot, any one of them is stored. No gradient passes. `in_place`: on a CPU, to a plain
    pool. `triton`: on a GPU; for FP8 rows with the same slot, parts of several may be mixed.
    """
    TABLE.module(impl, row_TX, pool_PZX, slot_T).store_rows(pool_PZX, slot_T, row_TX)
