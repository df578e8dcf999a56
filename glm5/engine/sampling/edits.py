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
    """Whose logits the rows are. `slots` [T] is the host's copy of `slot_T`, int64 both; the last slot is padding's.

    `position_T`: index in its sequence of the token that row r draws. `offset_T`: how many drafts the row assumes.
    """

    slots: NDArray[np.int64]
    slot_T: Tensor
    position_T: Tensor
    offset_T: Tensor

    def __getitem__(self, part: slice) -> "Rows":
        return Rows(self.slots[part], self.slot_T[part], self.position_T[part], self.offset_T[part])


def edited(
    logits_TW: Tensor,
    rows: Rows,
    drafts_Y: Tensor | None,
    tables: SlotTables,
    features: int,
    first: int | None = None,
) -> Tensor:
    """The logits in float32 as those of the rows' parameters leave them that are `features`: a copy, unless there is
    nothing to do. `first`: they are of the W token ids from there on; None: of all."""
    if not features & EDITS:
        return logits_TW.float()
    assumed_T = _assumed(rows, drafts_Y)
    logits_TW = logits_TW.to(torch.float32, copy=True)
    if features & Feature.PERMITTED:
        _keep_permitted(logits_TW, tables.bitmask_Y[rows.slot_T, rows.offset_T], first or 0)
    if features & Feature.BAD_WORDS:
        _mask_bad_words(logits_TW, rows, assumed_T, tables, first)
    if features & Feature.BIASES:
        _add_biases(logits_TW, rows, tables, first)
    if features & Feature.PENALTIES:
        _penalize(logits_TW, rows, assumed_T, tables, first)
    return logits_TW


def _assumed(rows: Rows, drafts_Y: Tensor | None) -> Tensor | None:
    """The drafts that each row assumes, -1 after them, int64 [T, depth]."""
    if drafts_Y is None:
        return None
    index = torch.arange(drafts_Y.shape[1], device=drafts_Y.device)
    return drafts_Y.index_select(0, rows.slot_T).masked_fill(index >= rows.offset_T[:, None], -1)


def _keep_permitted(logits_TW: Tensor, bitmask_T: Tensor, first: int) -> None:
    """-inf for every token whose bit is 0 in the row's mask."""
    byte = torch.arange(256, device=logits_TW.device)[:, None]
    barred = ((byte >> torch.arange(8, device=logits_TW.device)) & 1) == 0
    added = torch.zeros(256, 8, device=logits_TW.device).masked_fill_(barred, -torch.inf)
    bytes_T = bitmask_T.contiguous().view(torch.uint8)  # little-endian, as every device that torch runs on
    begin, end = first // 8, -(-(first + logits_TW.shape[1]) // 8)
    added_TW = added.index_select(0, bytes_T[:, begin:end].flatten().int()).view(len(logits_TW), -1)
    logits_TW += added_TW[:, first % 8 :][:, : logits_TW.shape[1]]


def _within(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Places of token ids among the `count` from `first` on (any place for others), and whether they are among them."""
    place = ids - first
    return place.clamp(0, count - 1), (place >= 0) & (place < count)


def _mask_bad_words(
    logits_TW: Tensor, rows: Rows, assumed_T: Tensor | None, tables: SlotTables, first: int | None
) -> None:
    """-inf for the last token of each bad word whose other tokens the row's output ends with."""
    num_words, longest = tables.bad_words_of(rows.slots)
    tail_TU = tables.tail_YU.index_select(0, rows.slot_T)
    tail_len = tail_TU.shape[1]
    if assumed_T is not None:
        both = torch.cat([tail_TU, assumed_T.int()], dim=1)
        tail_TU = both.gather(1, rows.offset_T[:, None] + torch.arange(tail_len, device=both.device))
    begin = tail_len - (longest - 1)
    heads_TUU = tables.bad_heads_YUU[:, :num_words, begin:].index_select(0, rows.slot_T)
    same_TUU = (heads_TUU == tail_TU[:, None, begin:]) | (heads_TUU == ANY_TOKEN)
    hit_TU = same_TUU.all(dim=-1) & tables.is_bad_word_YU[:, :num_words].index_select(0, rows.slot_T)
    last_TU = tables.bad_last_YU[:, :num_words].index_select(0, rows.slot_T)
    if first is not None:
        last_TU, is_within_TU = _within(last_TU, first, logits_TW.shape[1])
        hit_TU &= is_within_TU
    logits_TW.scatter_add_(1, last_TU, torch.zeros_like(hit_TU, dtype=torch.float32).masked_fill_(hit_TU, -torch.inf))


def _add_biases(logits_TW: Tensor, rows: Rows, tables: SlotTables, first: int | None) -> None:
    """Logit biases, and -inf for stop tokens before min_tokens: entries that hold while position < end."""
    num_biases = tables.num_biases_of(rows.slots)
    ids_TU, biases_TU, ends_TU = (
        table[:, :num_biases].index_select(0, rows.slot_T)
        for table in (tables.bias_ids_YU, tables.biases_YU, tables.bias_ends_YU)
    )
    holds_TU = rows.position_T[:, None] < ends_TU
    if first is not None:
        ids_TU, is_within_TU = _within(ids_TU, first, logits_TW.shape[1])
        holds_TU &= is_within_TU
    logits_TW.scatter_add_(1, ids_TU, torch.where(holds_TU, biases_TU, 0.0))


def _penalize(logits_TW: Tensor, rows: Rows, assumed_T: Tensor | None, tables: SlotTables, first: int | None) -> None:
    """Repetition (of prompt and output), then frequency and presence (of output), as vLLM defines them."""
    span = slice(None) if first is None else slice(first, first + logits_TW.shape[1])
    counts_TW = tables.counts_YW[:, span].index_select(0, rows.slot_T)
    if assumed_T is not None:
        place_of_drafts_T, is_within_drafts_T = _within(assumed_T, first or 0, logits_TW.shape[1])
        counts_TW.scatter_add_(1, place_of_drafts_T, is_within_drafts_T.int())
    numbers = tables.numbers_of(rows.slot_T)
    presence_T1, frequency_T1, repetition_T1 = (
        numbers(f"{name}_penalty")[:, None] for name in ("presence", "frequency", "repetition")
    )
    written_TW = counts_TW > 0
    seen_TW = tables.in_prompt_YW[:, span].index_select(0, rows.slot_T).logical_or_(written_TW)
    repeated_TW = torch.where(logits_TW > 0, logits_TW / repetition_T1, logits_TW * repetition_T1)
    logits_TW.copy_(torch.where(seen_TW, repeated_TW, logits_TW))
    logits_TW -= counts_TW * frequency_T1
    logits_TW -= written_TW * presence_T1
