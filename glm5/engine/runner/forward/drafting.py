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

    hidden_RD: Tensor
    selection: Selection


@dataclass(frozen=True)
class DraftRows:
    """The sequences that sampled: their slots (on host and device), the first sampling row of each, and the number of
    its committed tokens. `ahead_KC`: constant rows of -1, 0, 1 .., if preallocated."""

    slots: NDArray[np.int64]
    slot_C: Tensor
    first_C: Tensor
    count_C: Tensor
    ahead_KC: Tensor | None = None


class Drafter:
    """Writes `slots.draft_SK`."""

    def __init__(self, passes: Passes, cache: KVCache, slots: SlotState, sampler: Sampler):
        self.passes, self.cache, self.slots, self.sampler = passes, cache, slots, sampler
        self.shares_selection = passes.model.cfg.index_share_for_mtp_iteration

    def extend(self, view: StepView, next_R: Tensor, hidden_RD: Tensor) -> Extended:
        """Run the layer over the rows of a step, `next_R` being the token after each."""
        hidden_RD, selection = self.passes.draft(next_R, hidden_RD, view)
        return Extended(hidden_RD, selection)

    def draft(
        self, extended: Extended, rows: DraftRows, depth: int, *, max_end: int, features: int | None = None
    ) -> None:
        """Make `depth` drafts for each sequence with new tokens. No row attends to more than `max_end` keys.
        `features`: of `Sampler.sample`."""
        last_C = rows.first_C + rows.count_C - 1
        hidden_CD = extended.hidden_RD[last_C]
        selection = rows_of(extended.selection, last_C) if self.shares_selection else None
        token_C = rows.slot_C  # not read before the first draft
        for index in range(depth):
            if index:
                hidden_CD, _ = self.passes.draft(token_C, hidden_CD, self._view(rows, index, max_end), selection)
            # Greedy drafts use neither position nor offset.
            position_C = offset_C = rows.slot_C
            if features != 0:
                position_C, offset_C = self.slots.len_S[rows.slot_C] + index, torch.full_like(rows.slot_C, index)
            where = Rows(rows.slots, rows.slot_C, position_C, offset_C)
            assumed_SK = self.slots.draft_SK if index else None
            logits_CW = self.passes.logits(hidden_CD)
            guess = self.sampler.sample(logits_CW, where, assumed_SK, drafting=True, features=features)
            token_C = guess.token_R
            self.slots.draft_SK[rows.slot_C, index] = token_C

    def _view(self, rows: DraftRows, index: int, max_end: int) -> StepView:
        """A view of one token of each sequence, `index` - 1 positions after the last known one."""
        is_invariant = self.passes.num_rows is not None
        if is_invariant or rows.ahead_KC is None:
            return StepView.of(
                self.cache,
                self.slots,
                slot_B=rows.slot_C,
                group_T=torch.arange(len(rows.slot_C), device=self.slots.device),
                slot_T=rows.slot_C,
                positions_T=self.slots.len_S[rows.slot_C] - 2 + index,
                live_T=(rows.count_C > 0).long(),
                max_end=max_end,
                invariant=is_invariant,
            )
        where = self.slots.rows(rows.slot_C, rows.ahead_KC[0], rows.ahead_KC[index], rows.count_C)
        group_C = torch.arange(len(rows.slot_C), dtype=torch.int32, device=self.slots.device)
        return StepView.at(self.cache, self.slots, where, slot_B=rows.slot_C, group_T=group_C, max_end=max_end)
