"""Drafts from the MTP layer (model spec, section 3.10): guesses of the next tokens, which the next step verifies.

At position p the layer reads token p+1 and the target's hidden state, and predicts token p+2. A step first runs it
over its own rows, after the token after each is known. This makes the layer's keys as final as the target's, and the
row before a sequence's last token gives its first draft. Each further draft is one row a sequence, from the draft
before it and the layer's own hidden state. The next step overwrites the keys of those rows.

With `index_share_for_mtp_iteration`, further drafts read the keys that the first one's row selected.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.forward.passes import Passes, rows_of
from glm5.engine.runner.inputs.slot_state import SlotState
from glm5.engine.runner.inputs.view import StepView
from glm5.engine.sampling import Rows, Sampler
from glm5.model.seams import Selection


@dataclass(frozen=True)
class Extended:
    """Outputs of the layer for the rows of a step."""

    hidden_TD: Tensor
    selection: Selection


@dataclass(frozen=True)
class DraftRows:
    """The sequences that sampled: their slots (on host and device), the first sampling row of each, and the number of
    its committed tokens. `ahead_B`: constant rows of -1, 0, 1 .., if preallocated."""

    slots: NDArray[np.int64]
    sampling_slot_B: Tensor
    first_B: Tensor
    count_B: Tensor
    ahead_B: Tensor | None = None


class Drafter:
    """Writes `slots.drafts_Y`."""

    def __init__(self, passes: Passes, cache: KVCache, slots: SlotState, sampler: Sampler):
        self.passes, self.cache, self.slots, self.sampler = passes, cache, slots, sampler
        self.shares_selection = passes.model.cfg.index_share_for_mtp_iteration

    def extend(self, view: StepView, next_T: Tensor, hidden_TD: Tensor) -> Extended:
        """Run the layer over the rows of a step, `next_T` being the token after each."""
        hidden_TD, selection = self.passes.draft(next_T, hidden_TD, view)
        return Extended(hidden_TD, selection)

    def draft(
        self, extended: Extended, rows: DraftRows, depth: int, *, max_end: int, features: int | None = None
    ) -> None:
        """Make `depth` drafts for each sequence with new tokens. No row attends to more than `max_end` keys.
        `features`: of `Sampler.sample`."""
        last_B = rows.first_B + rows.count_B - 1
        hidden_BD = extended.hidden_TD[last_B]
        selection = rows_of(extended.selection, last_B) if self.shares_selection else None
        token_B = rows.sampling_slot_B  # not read before the first draft
        for index in range(depth):
            if index:
                hidden_BD, _ = self.passes.draft(token_B, hidden_BD, self._view(rows, index, max_end), selection)
            # Greedy drafts use neither position nor offset.
            position_B = offset_B = rows.sampling_slot_B
            if features != 0:
                position_B, offset_B = (
                    self.slots.len_Y[rows.sampling_slot_B] + index,
                    torch.full_like(rows.sampling_slot_B, index),
                )
            where = Rows(rows.slots, rows.sampling_slot_B, position_B, offset_B)
            assumed_Y = self.slots.drafts_Y if index else None
            logits_BW = self.passes.logits(hidden_BD)
            guess = self.sampler.sample(logits_BW, where, assumed_Y, drafting=True, features=features)
            token_B = guess.token_T
            self.slots.drafts_Y[rows.sampling_slot_B, index] = token_B

    def _view(self, rows: DraftRows, index: int, max_end: int) -> StepView:
        """A view of one token of each sequence, `index` - 1 positions after the last known one."""
        is_invariant = self.passes.num_rows is not None
        if is_invariant or rows.ahead_B is None:
            return StepView.of(
                self.cache,
                self.slots,
                slot_B=rows.sampling_slot_B,
                group_T=torch.arange(len(rows.sampling_slot_B), device=self.slots.device),
                slot_T=rows.sampling_slot_B,
                positions_T=self.slots.len_Y[rows.sampling_slot_B] - 2 + index,
                live_T=(rows.count_B > 0).long(),
                max_end=max_end,
                invariant=is_invariant,
            )
        where = self.slots.rows(rows.sampling_slot_B, rows.ahead_B[0], rows.ahead_B[index], rows.count_B)
        group_B = torch.arange(len(rows.sampling_slot_B), dtype=torch.int32, device=self.slots.device)
        return StepView.at(self.cache, self.slots, where, slot_B=rows.sampling_slot_B, group_T=group_B, max_end=max_end)
