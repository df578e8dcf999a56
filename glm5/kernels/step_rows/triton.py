"""step_rows in one launch, as a dozen small ones would take as long as a layer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.step_rows.reference import StepRows
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import dependent_launch

_BLOCK = 128


@triton.jit
def _step_rows(
    slot_ptr,
    start_ptr,
    offset_ptr,
    live_ptr,
    len_ptr,
    token_ptr,
    table_ptr,
    position_ptr,
    id_ptr,
    end_ptr,
    place_ptr,
    num_rows,
    token_stride,
    table_stride,
    num_columns,
    dump_page,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = t < num_rows
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    slot = tl.load(slot_ptr + t, mask=real, other=0)
    start = tl.load(start_ptr + t, mask=real, other=0)
    last = tl.load(len_ptr + slot, mask=real, other=1) - 1
    position = tl.where(start < 0, last, start) + tl.load(offset_ptr + t, mask=real, other=0)
    live = real & (tl.load(live_ptr + t, mask=real, other=0) > 0)
    column = tl.minimum(position // Z, num_columns - 1)
    page = tl.load(table_ptr + slot * table_stride + column, mask=live, other=0).to(tl.int64)
    page = tl.where(live, page, dump_page)
    tl.store(position_ptr + t, position, mask=real)
    tl.store(id_ptr + t, tl.load(token_ptr + slot * token_stride + position, mask=real, other=0), mask=real)
    tl.store(end_ptr + t, tl.where(live, position + 1, 0).to(tl.int32), mask=real)
    tl.store(place_ptr + t, page * Z + position % Z, mask=real)


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
) -> StepRows:
    """As `reference.step_rows`."""
    rows = StepRows(
        torch.empty_like(slot_T),
        torch.empty_like(slot_T),
        torch.empty_like(slot_T, dtype=torch.int32),
        torch.empty_like(slot_T),
    )
    if len(slot_T):
        _step_rows[(triton.cdiv(len(slot_T), _BLOCK),)](
            slot_T.contiguous(),
            start_T.contiguous(),
            offset_T.contiguous(),
            live_T.contiguous(),
            len_Y,
            token_YS,
            table_YP,
            *rows,
            len(slot_T),
            token_YS.stride(0),
            table_YP.stride(0),
            table_YP.shape[1],
            dump_page,
            Z=page_size,
            BLOCK=_BLOCK,
            num_warps=4,
            **dependent_launch(slot_T.device),
        )
    return rows
