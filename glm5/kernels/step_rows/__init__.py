"""Where the rows of a step are: position, token, what they see, and where their keys go."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.step_rows.reference import StepRows
from glm5.kernels.step_rows.reference import step_rows as _reference
from glm5.kernels.triton_support import chosen

__all__ = ["StepRows", "step_rows"]


def step_rows(
    slot_T: Tensor,
    start_T: Tensor,
    offset_T: Tensor,
    live_T: Tensor,
    len_S: Tensor,
    token_SN: Tensor,
    table_SN: Tensor,
    *,
    page_size: int,
    dump_page: int,
    impl: Literal["auto", "reference", "triton"] = "auto",
) -> StepRows:
    """Row t is of the sequence in slot `slot_T[t]`, at `start_T[t]` + offset, or, where start is negative, counted from
    the sequence's last known token. `len_S`: tokens known, `token_SN` token ids, `table_SN` int32 pages, a row a slot;
    the last column of pages is nobody's. Where `live_T` is not positive, the row is padding: it sees nothing and writes
    to the dump page. Integers are int64 unless said.
    """
    where = slot_T, start_T, offset_T, live_T, len_S, token_SN, table_SN
    if impl == "auto":
        impl = "triton" if chosen(slot_T) else "reference"
    if impl == "reference":
        return _reference(*where, page_size=page_size, dump_page=dump_page)
    if impl == "triton":
        from glm5.kernels.step_rows.triton import step_rows as run

        return run(*where, page_size=page_size, dump_page=dump_page)
    raise unknown_impl("step_rows", impl, ("reference", "triton"))
