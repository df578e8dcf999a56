"""State of each slot on the device: token ids, true length, drafts, and the row of the page table.

A step reads and writes these tables in place, so the next one can be enqueued before the host has read its tokens. The
last slot is for padding. During a step, the token table holds its drafts beyond the true length.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from glm5.engine.runner.inputs.batch import Ints, padded
from glm5.engine.sampling.drafts import Accepted
from glm5.engine.scheduler.plan import Entered, TableEntry
from glm5.kernels.step_rows import StepRows, step_rows
from glm5.kernels.upload import upload

# Letters not in `glm5.model`: S slots, the last for padding; N columns of a table; C sampling sequences.


class SlotState:
    """Tables for `num_slots` sequences of up to `max_len` tokens and `max_depth` drafts a step."""

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        max_depth: int,
        *,
        page_size: int,
        dump_page: int,
        device: torch.device,
    ):
        S = num_slots + 1
        self.page_size, self.dump_page, self.max_depth, self.device = page_size, dump_page, max_depth, device
        # A sequence that has ended may still get rows until the host knows: a step's rows, and drafts after them.
        self.token_YS = torch.zeros(S, max_len + 4 * (1 + max_depth), dtype=torch.int64, device=device)
        self.len_Y = torch.ones(S, dtype=torch.int64, device=device)
        self.drafts_Y = torch.zeros(S, max_depth, dtype=torch.int64, device=device)
        # The last column always has the dump page: positions beyond the other columns are looked up there.
        self.num_columns = -(-max_len // page_size) + 1
        self.table_YP = torch.full((S, self.num_columns), dump_page, dtype=torch.int32, device=device)

    def enter(self, entered: Sequence[Entered]) -> None:
        """Write tokens, length and pages of newly admitted sequences."""
        if self.device.type == "cpu":  # a third of the time that as many small tensors cost
            token_YS, table_YP, len_Y = self.token_YS.numpy(), self.table_YP.numpy(), self.len_Y.numpy()
            for one in entered:
                token_YS[one.slot, : len(one.token_ids)] = one.token_ids
                table_YP[one.slot] = padded(_ints(one.pages), self.num_columns, self.dump_page)
                len_Y[one.slot] = len(one.token_ids)
            return
        parts = [_ints([one.slot for one in entered]), _ints([len(one.token_ids) for one in entered])]
        for one in entered:
            parts += [_ints(one.token_ids), padded(_ints(one.pages), self.num_columns, self.dump_page)]
        slot_B, len_B, *rest = upload(np.concatenate(parts), self.device).split([len(part) for part in parts])
        for one, token_S, page_P in zip(entered, rest[::2], rest[1::2], strict=True):
            self.token_YS[one.slot, : len(token_S)] = token_S
            self.table_YP[one.slot] = page_P
        self.len_Y.index_copy_(0, slot_B, len_B)

    def change(self, table: Sequence[TableEntry]) -> None:
        """Write changed entries of the page table."""
        if table:
            slots, columns, pages = upload(np.array(table, dtype=np.int64), self.device).unbind(dim=1)
            self.table_YP[slots, columns] = pages.int()

    def positions(self, slot_T: Tensor, start_T: Tensor, offset_T: Tensor) -> Tensor:
        """Position of each row: start + offset; a start of -1 stands for the last known token."""
        if self.device.type == "cpu":  # NumPy: a fraction of the time that tensors this small cost
            start, length = start_T.numpy(), self.len_Y.numpy()[slot_T.numpy()]
            return torch.from_numpy(np.where(start < 0, length - 1, start) + offset_T.numpy())
        return torch.where(start_T < 0, self.len_Y[slot_T] - 1, start_T) + offset_T

    def tokens(self, slot_T: Tensor, position_T: Tensor) -> Tensor:
        """Token ids at these positions."""
        if self.device.type == "cpu":
            return torch.from_numpy(self.token_YS.numpy()[slot_T.numpy(), position_T.numpy()])
        return self.token_YS[slot_T, position_T]

    def rows(self, slot_T: Tensor, start_T: Tensor, offset_T: Tensor, live_T: Tensor) -> StepRows:
        """`kernels.step_rows` of these tables."""
        tables = self.len_Y, self.token_YS, self.table_YP
        where = slot_T, start_T, offset_T, live_T
        return step_rows(*where, *tables, page_size=self.page_size, dump_page=self.dump_page)

    def commit(self, token_T: Tensor, slot_T: Tensor, position_T: Tensor, accepted: Accepted) -> None:
        """Write sampled tokens, and increase lengths by the accepted ones."""
        if self.device.type == "cpu":
            self.token_YS.numpy()[slot_T.numpy(), position_T.numpy()] = token_T.numpy()
        else:
            self.token_YS[slot_T, position_T] = token_T
        self.len_Y += accepted.count_Y

    def assume(self, sampling_slot_B: Tensor) -> None:
        """Write the drafts of these slots after their tokens, for a step that checks them. (Older drafts, or tokens
        sampled since, may be there.)"""
        if self.max_depth:
            place_of_drafts_B = self.len_Y[sampling_slot_B][:, None] + torch.arange(self.max_depth, device=self.device)
            self.token_YS[sampling_slot_B[:, None], place_of_drafts_B] = self.drafts_Y[sampling_slot_B]


def _ints(numbers: Sequence[int]) -> Ints:
    # For a list, a third of the time of torch.tensor.
    return np.fromiter(numbers, np.int64, len(numbers))
