"""What parameters do to logits before anything is drawn: tokens barred, biased, penalized, in vLLM's order.

A row that assumes drafts sees them as written: penalties count them, bad words continue them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.engine.sampling.params import Feature
from glm5.engine.sampling.slots import ANY_TOKEN, SlotTables

EDITS = Feature.PERMITTED | Feature.BAD_WORDS | Feature.BIASES | Feature.PENALTIES


@dataclass(frozen=True)
class Rows:
    """Whose logits the rows are. `slots` [R] is the host's copy of `slot_R`, int64 both; the last slot is padding's.

    `position_R`: index in its sequence of the token that row r draws. `offset_R`: how many drafts the row assumes.
    """

    slots: NDArray[np.int64]
    slot_R: Tensor
    position_R: Tensor
    offset_R: Tensor

    def __getitem__(self, part: slice) -> "Rows":
        return Rows(self.slots[part], self.slot_R[part], self.position_R[part], self.offset_R[part])


def edited(
    logits_RW: Tensor,
    rows: Rows,
    draft_SK: Tensor | None,
    tables: SlotTables,
    features: int,
    first: int | None = None,
) -> Tensor:
    """The logits in float32 as those of the rows' parameters leave them that are `features`: a copy, unless there is
    nothing to do. `first`: they are of the W token ids from there on; None: of all."""
    if not features & EDITS:
        return logits_RW.float()
    assumed_RK = _assumed(rows, draft_SK)
    logits_RW = logits_RW.to(torch.float32, copy=True)
    if features & Feature.PERMITTED:
        _keep_permitted(logits_RW, tables.permitted_SJM[rows.slot_R, rows.offset_R], first or 0)
    if features & Feature.BAD_WORDS:
        _bar_bad_words(logits_RW, rows, assumed_RK, tables, first)
    if features & Feature.BIASES:
        _add_biases(logits_RW, rows, tables, first)
    if features & Feature.PENALTIES:
        _penalize(logits_RW, rows, assumed_RK, tables, first)
    return logits_RW


def _assumed(rows: Rows, draft_SK: Tensor | None) -> Tensor | None:
    """The drafts that each row assumes, -1 after them, int64 [R, K]."""
    if draft_SK is None:
        return None
    index_K = torch.arange(draft_SK.shape[1], device=draft_SK.device)
    return draft_SK.index_select(0, rows.slot_R).masked_fill(index_K >= rows.offset_R[:, None], -1)


def _keep_permitted(logits_RW: Tensor, permitted_RM: Tensor, first: int) -> None:
    """-inf for every token whose bit is 0 in the row's mask."""
    byte = torch.arange(256, device=logits_RW.device)[:, None]
    barred = ((byte >> torch.arange(8, device=logits_RW.device)) & 1) == 0
    added = torch.zeros(256, 8, device=logits_RW.device).masked_fill_(barred, -torch.inf)
    bytes_RM4 = permitted_RM.contiguous().view(torch.uint8)  # little-endian, as every device that torch runs on
    begin, end = first // 8, -(-(first + logits_RW.shape[1]) // 8)
    added_RW = added.index_select(0, bytes_RM4[:, begin:end].flatten().int()).view(len(logits_RW), -1)
    logits_RW += added_RW[:, first % 8 :][:, : logits_RW.shape[1]]


def _within(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Places of token ids among the `count` from `first` on (any place for others), and whether they are among them."""
    place = ids - first
    return place.clamp(0, count - 1), (place >= 0) & (place < count)


def _bar_bad_words(
    logits_RW: Tensor, rows: Rows, assumed_RK: Tensor | None, tables: SlotTables, first: int | None
) -> None:
    """-inf for the last token of each bad word whose other tokens the row's output ends with."""
    num_words, longest = tables.bad_words_of(rows.slots)
    tail_RL = tables.tail_SL.index_select(0, rows.slot_R)
    tail_len = tail_RL.shape[1]
    if assumed_RK is not None:
        both = torch.cat([tail_RL, assumed_RK.int()], dim=1)
        tail_RL = both.gather(1, rows.offset_R[:, None] + torch.arange(tail_len, device=both.device))
    begin = tail_len - (longest - 1)
    heads_RUL = tables.bad_heads_SUL[:, :num_words, begin:].index_select(0, rows.slot_R)
    same_RUL = (heads_RUL == tail_RL[:, None, begin:]) | (heads_RUL == ANY_TOKEN)
    hit_RU = same_RUL.all(dim=-1) & tables.is_bad_word_SU[:, :num_words].index_select(0, rows.slot_R)
    last_RU = tables.bad_last_SU[:, :num_words].index_select(0, rows.slot_R)
    if first is not None:
        last_RU, is_within_RU = _within(last_RU, first, logits_RW.shape[1])
        hit_RU &= is_within_RU
    logits_RW.scatter_add_(1, last_RU, torch.zeros_like(hit_RU, dtype=torch.float32).masked_fill_(hit_RU, -torch.inf))


def _add_biases(logits_RW: Tensor, rows: Rows, tables: SlotTables, first: int | None) -> None:
    """Logit biases, and -inf for stop tokens before min_tokens: entries that hold while position < end."""
    num_biases = tables.num_biases_of(rows.slots)
    ids_RU, biases_RU, ends_RU = (
        table[:, :num_biases].index_select(0, rows.slot_R)
        for table in (tables.bias_ids_SU, tables.biases_SU, tables.bias_ends_SU)
    )
    holds_RU = rows.position_R[:, None] < ends_RU
    if first is not None:
        ids_RU, is_within_RU = _within(ids_RU, first, logits_RW.shape[1])
        holds_RU &= is_within_RU
    logits_RW.scatter_add_(1, ids_RU, torch.where(holds_RU, biases_RU, 0.0))


def _penalize(logits_RW: Tensor, rows: Rows, assumed_RK: Tensor | None, tables: SlotTables, first: int | None) -> None:
    """Repetition (of prompt and output), then frequency and presence (of output), as vLLM defines them."""
    span = slice(None) if first is None else slice(first, first + logits_RW.shape[1])
    counts_RW = tables.counts_SW[:, span].index_select(0, rows.slot_R)
    if assumed_RK is not None:
        place_RK, is_within_RK = _within(assumed_RK, first or 0, logits_RW.shape[1])
        counts_RW.scatter_add_(1, place_RK, is_within_RK.int())
    numbers = tables.numbers_of(rows.slot_R)
    presence_R1, frequency_R1, repetition_R1 = (
        numbers(f"{name}_penalty")[:, None] for name in ("presence", "frequency", "repetition")
    )
    written_RW = counts_RW > 0
    seen_RW = tables.in_prompt_SW[:, span].index_select(0, rows.slot_R).logical_or_(written_RW)
    repeated_RW = torch.where(logits_RW > 0, logits_RW / repetition_R1, logits_RW * repetition_R1)
    logits_RW.copy_(torch.where(seen_RW, repeated_RW, logits_RW))
    logits_RW -= counts_RW * frequency_R1
    logits_RW -= written_RW * presence_R1
