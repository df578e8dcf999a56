"""position = (start, or the last known token) + offset;  token = tokens[slot, position];  end = position + 1;
place = pages[slot, position / Z] * Z + position % Z"""

from typing import NamedTuple

import torch
from torch import Tensor


class StepRows(NamedTuple):
    """`position_T`, `id_T` int64; `end_T` int32, number of visible keys; `slot_mapping_T` int64, slot in the pool."""

    position_T: Tensor
    id_T: Tensor
    end_T: Tensor
    slot_mapping_T: Tensor


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
    position_T = torch.where(start_T < 0, len_Y[slot_T] - 1, start_T) + offset_T
    is_live = live_T > 0
    column_T = (position_T // page_size).clamp_max(table_YP.shape[1] - 1)
    page_T = torch.where(is_live, table_YP[slot_T, column_T].long(), dump_page)
    end_T = torch.where(is_live, position_T + 1, 0).int()
    return StepRows(position_T, token_YS[slot_T, position_T], end_T, page_T * page_size + position_T % page_size)
