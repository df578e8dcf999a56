"""Logits in, tokens out, by the tables of the slots that the rows belong to.

A batch does the work that any of its rows needs, and no Python runs per request. A wide vocabulary is worked through
in a few rows at a time on a CPU, so that intermediates stay in cache and each part does only its own rows' work.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.engine.sampling.drafts import Accepted
from glm5.engine.sampling.draw import Vocabulary, drawn_from, kept, race
from glm5.engine.sampling.edits import EDITS, Rows, edited
from glm5.engine.sampling.logprobs import Logprobs
from glm5.engine.sampling.params import CUTS, REPORTS, Feature
from glm5.engine.sampling.parts import VocabShard
from glm5.engine.sampling.simulated import simulated
from glm5.engine.sampling.slots import Placement, SlotTables
from glm5.kernels.best_token import best_token
from glm5.kernels.sampled_logprobs import Kept

_UNKNOWN_AHEAD = Feature.PERMITTED | REPORTS
_ALL = -1
_CACHED = 1 << 18  # elements of a CPU's part: 1 MB in float32, about one core's L2


@dataclass
class Sampled:
    """Tokens int64 [T]; rows without a valid token (all barred, or NaN), bool [T]. If requested: log-probabilities;
    sampling masks [T, U], the token ids that were left to draw from, as bits."""

    token_T: Tensor
    no_valid_token_T: Tensor
    logprobs: Logprobs | None
    mask_TU: Tensor | None = None


class Sampler:
    """Sampling state of `num_slots` sequences with up to `max_drafts` drafts each.

    `place` and `permit` write the slots' tables between steps, `sample` reads them, `record` keeps them up to date;
    all work is enqueued in that order and none of it waits for the device. With a `part`, logits are of its token ids
    alone, and the ranks that have the others do the same. `simulate`: see simulated.py.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        max_drafts: int = 0,
        device: torch.device | str = "cpu",
        part: VocabShard | None = None,
        simulate: float | None = None,
    ) -> None:
        self.part, self._simulate, self._vocab_size = part, simulate, vocab_size
        self.vocabulary = part or Vocabulary(0, vocab_size)
        self.tables = SlotTables(num_slots, vocab_size, 1 + max_drafts, torch.device(device))

    def place(self, placements: list[Placement]) -> None:
        """Sequences take slots; nothing of those who sat there remains."""
        self.tables.place(placements)

    def permit(self, slots: list[int], bitmasks: Tensor) -> None:
        """Masks of the next step's rows for sequences with a grammar: int32 on the host [len(slots), J, ceil(W / 32)].

        A mask holds until the next one; bitmasks is overwritten where a slot has allowed_token_ids as well.
        """
        self.tables.permit(slots, bitmasks)

    def sample(
        self,
        logits_TW: Tensor,
        rows: Rows,
        drafts_Y: Tensor | None = None,
        *,
        drafting: bool = False,
        features: int | None = None,
    ) -> Sampled:
        """One token a row. The logits are left alone. `drafts_Y`: drafts [Y, depth], None where every offset is 0.

        `drafting`: the tokens are only guesses. Masks are not applied, as they are not known yet so far ahead, and
        there are no log-probabilities. `features`: the work to do, if not what the slots of `rows` need; more than
        that changes no token.
        """
        found = self._sample_all(logits_TW, rows, drafts_Y, drafting=drafting, features=features)
        if self._simulate is not None and drafts_Y is not None and not drafting:
            found.token_T = simulated(found.token_T, rows, drafts_Y, self._simulate)
        return found

    def record(self, accepted: Accepted, slots: NDArray[np.int64]) -> None:
        """Count the tokens that sequences gained: later rows are penalized for them. `slots`: the step's `Rows.slots`.

        Not called for drafts: rows that assume them count them by themselves.
        """
        self.tables.record(accepted.tokens_Y, accepted.count_Y, self.tables.features_of(slots))

    def _sample_all(
        self, logits_TW: Tensor, rows: Rows, drafts_Y: Tensor | None, *, drafting: bool, features: int | None
    ) -> Sampled:
        num_rows, vocab_size = logits_TW.shape
        assert vocab_size == self.vocabulary.size, f"{vocab_size=} {self.vocabulary.size=}"
        assert len(rows.slots) == num_rows, f"{len(rows.slots)=} {num_rows=}"
        wanted = ~_UNKNOWN_AHEAD if drafting else _ALL
        features = (self.tables.features_of(rows.slots) if features is None else features) & wanted
        num_logprobs = self.tables.num_logprobs_of(rows.slots) if features & Feature.LOGPROBS else 0
        step = max(1, _CACHED // vocab_size) if logits_TW.device.type == "cpu" else num_rows
        if num_rows <= step:
            return self._sample(logits_TW, rows, drafts_Y, features, num_logprobs)
        spans = [slice(first, first + step) for first in range(0, num_rows, step)]
        parts = ((logits_TW[span], rows[span]) for span in spans)
        # Each part does its own rows' work. Of all rows the same is reported; only what is drawn has a mask.
        shown = features & REPORTS | (Feature.RANDOM if features & Feature.MASK else 0)
        selected = ((logits, part, self.tables.features_of(part.slots) & features | shown) for logits, part in parts)
        return _joined(self._sample(logits, part, drafts_Y, work, num_logprobs) for logits, part, work in selected)

    def _sample(
        self,
        logits_TW: Tensor,
        rows: Rows,
        drafts_Y: Tensor | None,
        features: int,
        num_logprobs: int,
    ) -> Sampled:
        part, vocabulary = self.part, self.vocabulary
        if not features and part is None:
            return Sampled(*best_token(logits_TW), None)
        edited_TW = edited(logits_TW, rows, drafts_Y, self.tables, features, part and part.first)
        best = vocabulary.best(edited_TW)
        token_T, drawn_from_TW = best.token_T, self._untruncated(edited_TW, rows, features)
        found = mask_TU = None
        if features & Feature.RANDOM:
            numbers = self.tables.numbers_of(rows.slot_T)
            z_TW = kept(edited_TW, best, numbers, features, vocabulary)
            if drawn_from_TW is not None and features & CUTS:
                drawn_from_TW = drawn_from(edited_TW, numbers("temperature"), z_TW)
            if features & Feature.MASK:
                mask_TU = vocabulary.kept_bits(z_TW)
            token_T = race(z_TW, best, rows.position_T, numbers, vocabulary)
        if features & Feature.LOGPROBS:
            found = vocabulary.logprobs(logits_TW, token_T, drawn_from_TW, num_logprobs)
        return Sampled(token_T, best.value_T.isfinite().logical_not_(), found, mask_TU)

    def logprobs(
        self, logits_TW: Tensor, token_T: Tensor, num_logprobs: int, temperature: float, kept: Kept | None = None
    ) -> Logprobs:
        """`logprobs` of tokens that are given, not drawn; `temperature` 0 counts as 1. `kept`: their vocabularies."""
        drawn_from_TW = None if temperature in (0, 1) and kept is None else logits_TW.float() / (temperature or 1)
        if kept is not None:
            assert drawn_from_TW is not None, f"{temperature=}"
            first, size = self.vocabulary.first, self.vocabulary.size
            drawn_from_TW.masked_fill_(kept.dropped(self._vocab_size)[:, first : first + size], -torch.inf)
        return self.vocabulary.logprobs(logits_TW, token_T, drawn_from_TW, num_logprobs)

    def _untruncated(self, edited_TW: Tensor, rows: Rows, features: int) -> Tensor | None:
        """The distribution before top-k and top-p; None if it is not needed, or is the model's own."""
        if not features & Feature.LOGPROBS or not features & (Feature.TEMPERED | EDITS | CUTS):
            return None
        return drawn_from(edited_TW, self.tables.numbers_of(rows.slot_T)("temperature"), None)


def _joined(parts: Any) -> Sampled:
    """One Sampled of several, in order."""
    parts = list(parts)
    found = [part.logprobs for part in parts if part.logprobs is not None]
    tokens, invalid = (torch.cat([getattr(part, name) for part in parts]) for name in ("token_T", "no_valid_token_T"))
    masks = [part.mask_TU for part in parts if part.mask_TU is not None]
    return Sampled(tokens, invalid, Logprobs.joined(found) if found else None, torch.cat(masks) if masks else None)
