"""Steps with prompts, on a GPU: the model over all of their rows in few static shapes, captured as CUDA graphs.

    target    rows -> positions, hidden states
    extend    rows and the token after each -> hidden states and selection of the draft layer

A shape is a number of rows, a number of page table rows, a context bucket (decode.py), and whether all rows are those
of full prompts. The other work (log-probabilities of prompts, sampling, further drafts) is small and has any number of
rows; it is launched without a graph while the device computes the target. Launching a layer's kernels one by one takes
the host 2 ms: longer than the device takes for 2,000 tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.forward.drafting import Drafter, Extended
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.forward.routing import RoutingRecord
from glm5.engine.runner.graphs.captured import Graphs, Piece
from glm5.engine.runner.graphs.decode import context_bucket_of
from glm5.engine.runner.inputs.batch import Batch, padded, padding_batch
from glm5.engine.runner.inputs.slot_state import SlotState
from glm5.engine.runner.inputs.view import StepView
from glm5.kernels.step_rows import StepRows
from glm5.model.seams import Selection

# From this many rows for each sequence on, kernels process rows of the same sequence together.
_CROWDED = 8


class PromptShape(NamedTuple):
    """`num_groups`: rows of the page table; the last ones are padding. `is_full`: all rows are of full prompts."""

    num_rows: int
    num_groups: int
    context_bucket: int
    is_full: bool


class PromptRows:
    """Inputs and outputs for one number of rows and groups. Hidden states and keys are shared with other numbers."""

    def __init__(self, num_rows: int, num_groups: int, hidden_2TD: Tensor, key_TK: Tensor):
        device = hidden_2TD.device
        self.packed = torch.zeros(6 * num_rows + num_groups, dtype=torch.int64, device=device)
        sizes = [num_rows] * 6 + [num_groups]
        self.slot_T, self.group_T, self.start_T, self.offset_T, self.live_T, self.first_T, self.slot_B = (
            self.packed.split(sizes)
        )
        self.here_T = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.position_T = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.hidden_TD, self.extended_TD = hidden_2TD[:, :num_rows]
        self.key_TK = key_TK[:num_rows]
        self.expert_ids_T: Tensor | None = None

    def load(self, batch: Batch, padding_slot: int) -> None:
        parts = batch.slot_T, batch.group_T, batch.start_T, batch.offset_T, batch.live_T, batch.first_T
        packed = torch.from_numpy(np.concatenate([*parts, padded(batch.slot_B, len(self.slot_B), padding_slot)]))
        self.packed.copy_(packed.pin_memory() if self.packed.is_cuda else packed, non_blocking=True)


@dataclass(frozen=True)
class PromptRun:
    """Outputs of the target for the rows of a step; the next step overwrites them."""

    shape: PromptShape
    rows: PromptRows


class PromptSteps:
    """Runs the target and the draft layer over the rows of steps with prompts, by replaying `graphs`."""

    def __init__(
        self,
        passes: Passes,
        cache: KVCache,
        slots: SlotState,
        drafter: Drafter | None,
        graphs: Graphs,
        context_buckets: Sequence[int],
        routing: RoutingRecord | None = None,
    ):
        self.passes, self.cache, self.slots, self.drafter = passes, cache, slots, drafter
        self.graphs, self.context_buckets, self.routing = graphs, context_buckets, routing
        self._most, self._padding_slot = len(slots.len_Y), len(slots.len_Y) - 1
        self._top_k = passes.model.cfg.index_topk
        self._rows: dict[tuple[int, int], PromptRows] = {}
        # When larger ones are allocated, shapes with fewer rows keep theirs.
        self._outputs = self._outputs_of(0)
        self._is_warm = False

    def run(self, batch: Batch, max_end: int) -> PromptRun:
        """Enqueue the target over the rows of `batch`."""
        self.graphs.forget_if_moved()
        num_rows, context_bucket = len(batch.slot_T), context_bucket_of(max_end, self.context_buckets)
        num_groups = next(count for count in self._groups(num_rows) if count >= len(batch.slot_B))
        shape = PromptShape(
            num_rows, num_groups, context_bucket, is_full=batch.full_prompts and context_bucket <= self._top_k
        )
        rows = self._rows_of(num_rows, num_groups)
        rows.load(batch, self._padding_slot)
        self._do("target", shape, rows)
        return PromptRun(shape, rows)

    def extend(self, ran: PromptRun) -> Extended:
        """Enqueue the draft layer over the same rows, after the token after each is known."""
        assert self.drafter is not None, f"{ran.shape=}"
        self._do("extend", ran.shape, ran.rows)
        is_selected = self.drafter.shares_selection and ran.shape.context_bucket > self._top_k
        return Extended(ran.rows.extended_TD, Selection(ran.rows.key_TK if is_selected else None))

    def shapes(self, token_buckets: Sequence[int]) -> list[PromptShape]:
        """Shapes that differ in their kernels: every number of rows within the first two context buckets, with few and
        many sequences; every larger context bucket with the most and the fewest rows."""
        ends = {max(token_buckets), min(token_buckets)}
        return [
            PromptShape(rows, groups, context_bucket, is_full=is_full)
            for rows in sorted(token_buckets, reverse=True)
            for groups in self._groups(rows)
            for index, context_bucket in enumerate(self.context_buckets)
            for is_full in ((True, False) if context_bucket <= self._top_k else (False,))
            if index < 2 or rows in ends
        ]

    @torch.inference_mode()
    def run_padding(self, shape: PromptShape) -> None:
        """Run a step of padding rows without a graph; it changes no state."""
        rows = self._padding(shape)
        self._target(rows, shape)
        if self.drafter is not None:
            self._extend(rows, shape)

    def capture_all(self, token_buckets: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Capture the most common shapes: full prompts, and prompts while others decode; yields (done, all). Kernels
        must have been compiled. Every other shape is captured before its first step."""
        near = (self.context_buckets[0], self.context_buckets[0] <= self._top_k), (self.context_buckets[:2][-1], False)
        wanted = [
            PromptShape(rows, self._groups(rows)[0], context_bucket, is_full)
            for rows in sorted(token_buckets, reverse=True)
            for context_bucket, is_full in near
        ]
        self.graphs.forget_if_moved()
        for done, shape in enumerate(wanted, start=1):
            rows = self._padding(shape)
            for name in ("target", "extend") if self.drafter is not None else ("target",):
                self._capture(name, shape, rows, warm=False)
            yield done, len(wanted)
        self._is_warm = True

    def _groups(self, num_rows: int) -> list[int]:
        """Allowed numbers of page table rows: few, with `_CROWDED` rows for each, and the number of slots."""
        few = min(num_rows // _CROWDED, self._most)
        return [few, self._most] if 1 < few < self._most else [self._most]

    def _rows_of(self, num_rows: int, num_groups: int) -> PromptRows:
        key = num_rows, num_groups
        if key not in self._rows:
            if num_rows > len(self._outputs[1]):
                self._outputs = self._outputs_of(num_rows)
            self._rows[key] = PromptRows(num_rows, num_groups, *self._outputs)
        return self._rows[key]

    def _outputs_of(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """(hidden states of target and draft layer, keys that the draft layer selected, if drafts share them)"""
        like_D = self.passes.model.model.norm.weight.detach()
        num_keys = self._top_k if self.drafter is not None and self.drafter.shares_selection else 0
        keys_TK = torch.zeros(num_rows, num_keys, dtype=torch.int32, device=like_D.device)
        return like_D.new_zeros(2, num_rows, len(like_D)), keys_TK

    def _padding(self, shape: PromptShape) -> PromptRows:
        rows = self._rows_of(shape.num_rows, shape.num_groups)
        padding = padding_batch(shape.num_rows, 1, self._padding_slot, decodes_only=False)
        rows.load(padding, self._padding_slot)
        return rows

    def _do(self, name: str, shape: PromptShape, rows: PromptRows) -> None:
        # The warm-up run changes nothing: the piece writes the same keys again.
        if self.graphs.captures and not self.graphs.has((name, shape)):
            self._capture(name, shape, rows, warm=not self._is_warm)
        self.graphs.run((name, shape), self._piece(name, shape, rows))

    def _capture(self, name: str, shape: PromptShape, rows: PromptRows, *, warm: bool) -> None:
        self.graphs.capture((name, shape), self._piece(name, shape, rows), warm=warm)

    def _piece(self, name: str, shape: PromptShape, rows: PromptRows) -> Piece:
        return partial(self._target if name == "target" else self._extend, rows, shape)

    def _target(self, rows: PromptRows, shape: PromptShape) -> None:
        where = self.slots.rows(rows.slot_T, rows.start_T, rows.offset_T, rows.live_T)
        rows.position_T.copy_(where.position_T)
        if self.routing is not None:
            self.routing.clear()
        rows.hidden_TD.copy_(self.passes.hidden(where.id_T, self._view_at(rows, where, shape)))
        if self.routing is not None:
            expert_ids_T = self.routing.experts()
            if rows.expert_ids_T is None:
                rows.expert_ids_T = torch.empty_like(expert_ids_T)
            rows.expert_ids_T.copy_(expert_ids_T)

    def _extend(self, rows: PromptRows, shape: PromptShape) -> None:
        assert self.drafter is not None, f"{shape=}"
        where = self.slots.rows(rows.slot_T, rows.position_T, rows.here_T, rows.live_T)
        next_T = self.slots.tokens(rows.slot_T, rows.position_T + 1)
        extended = self.drafter.extend(self._view_at(rows, where, shape), next_T, rows.hidden_TD)
        rows.extended_TD.copy_(extended.hidden_TD)
        if rows.key_TK.shape[1] and extended.selection.keys_TK is not None:
            rows.key_TK.copy_(extended.selection.keys_TK)

    def _view_at(self, rows: PromptRows, where: StepRows, shape: PromptShape) -> StepView:
        group_T = rows.group_T.int()
        view = StepView.at(
            self.cache, self.slots, where, slot_B=rows.slot_B, group_T=group_T, max_end=shape.context_bucket
        )
        return replace(view, first_T=rows.first_T.int()) if shape.is_full else view
