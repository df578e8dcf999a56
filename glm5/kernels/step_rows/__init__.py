"""Position, token, visible keys and cache slot of the rows of a step."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.step_rows.reference import StepRows

__all__ = ["StepRows", "step_rows"]


TABLE = Table(
    __name__,
    triton=Impl("one launch, which a CUDA graph can hold", on="triton", gradient=False),
    reference=Impl("the definition"),
)


def step_rows(
    slot_T: Tensor,
    start_T: Tensor,
    offset_T: Tensor,
    live_T: Tensor,
    len_Y: Tensor,
    token_YS: Tensor,
    table_YP: Tensor,
    *,
    page_size: int,
    dump_page: int,
    impl: str = "auto",
) -> StepRows:
    """Row t belongs to the sequence in slot `slot_T[t]`, at position `start_T[t]` + offset; with a negative start, at
    the sequence's last known token + offset. By slot: `len_Y` known tokens, `token_YS` token ids, `table_YP` int32
    pages, whose last column is the dump page. A row is padding if `live_T` is not positive: it sees nothing and writes
    to the dump page. Other integers are int64.
    """
    where = slot_T, start_T, offset_T, live_T, len_Y, token_YS, table_YP
    return TABLE.module(impl, slot_T).step_rows(*where, page_size=page_size, dump_page=dump_page)
