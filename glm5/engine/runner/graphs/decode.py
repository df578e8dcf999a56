"""Steps in which every sequence decodes, on a GPU: three pieces of static shape, each captured as a CUDA graph.

    target   rows -> positions, hidden states        by number of sequences, depth and context bucket
    sample   hidden states -> tokens, accepted       by number of sequences, depth and kind of sampling
    draft    MTP layer over the rows, then drafts    by number of sequences, depth, context bucket and kind of sampling

The inputs and outputs of a step have fixed addresses: its batch, uploaded when it changes; tables of the slots and of
the sampler; one tensor of results. So a step costs the host three launches and one copy, and waits for nothing. If
sampling parameters need more (penalties, grammars, log-probabilities, top-p), a piece runs without a graph.

Context buckets are upper bounds of the keys that a token attends to. They are few, as each has graphs of its own.
Kernels skip keys beyond a token's context, but their grids are as large as the bucket.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.forward.drafting import Drafter, DraftRows
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.forward.routing import RoutingRecord
from glm5.engine.runner.graphs.captured import Graphs, Piece
from glm5.engine.runner.inputs.batch import Batch, Ints, arrays, padding_batch
from glm5.engine.runner.inputs.slot_state import SlotState
from glm5.engine.runner.inputs.view import StepView
from glm5.engine.sampling import Rows, Sampled, Sampler, accept
from glm5.engine.sampling.params import REPORTS, Feature
from glm5.kernels.commit_tokens import CommittedTokens, commit_tokens
from glm5.kernels.step_rows import StepRows

KINDS = (0, Feature.RANDOM)  # the kinds of sampling that are captured
_NEAR = 3  # buckets whose graphs are captured before the first request
_CONTEXT_BUCKETS = (1, 2, 4, 16, 64)  # times index_topk; then the longest context


def context_buckets_of(top_k: int, max_len: int) -> tuple[int, ...]:
    """Context buckets up to `max_len`. Within the first one, attention reads all visible keys."""
    return (*[top_k * times for times in _CONTEXT_BUCKETS if top_k * times < max_len], max_len)


def context_bucket_of(max_end: int, context_buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `max_end`."""
    return next((bucket for bucket in context_buckets if max_end <= bucket), context_buckets[-1])


class Shape(NamedTuple):
    """Static shape of a step: its sequences, and the most drafts of each."""

    num_seqs: int
    depth: int

    @property
    def num_rows(self) -> int:
        return self.num_seqs * (1 + self.depth)


@dataclass
class DeviceBatch:
    """The arrays of a `Batch` on the device, with the same fields."""

    slot_B: Tensor
    group_T: Tensor
    slot_T: Tensor
    start_T: Tensor
    offset_T: Tensor
    live_T: Tensor
    sample_T: Tensor
    sample_slot_T: Tensor
    sample_offset_T: Tensor
    sampling_slot_B: Tensor
    first_B: Tensor
    sample_index_B: Tensor
    first_T: Tensor


class Buffers:
    """Inputs and outputs of one shape. `result`: tokens [B, 1 + depth], counts [B], drafts [B, depth], invalid [T]."""

    def __init__(self, shape: Shape, padding: Batch, like_D: Tensor, max_depth: int):
        device, B, width = like_D.device, shape.num_seqs, 1 + max_depth
        self.shape, self.padding = shape, padding
        self.packed = torch.from_numpy(_packed(padding)).to(device)
        self.on = DeviceBatch(*self.packed.split([len(part) for part in arrays(padding)]))
        self.position_T = torch.zeros(shape.num_rows, dtype=torch.int64, device=device)
        self.hidden_TD = like_D.new_zeros(shape.num_rows, like_D.shape[-1])
        # -1 for the last known token, then the offset from it at which each further draft is made.
        self.ahead_B = torch.arange(-1, max(1, max_depth), device=device)[:, None].repeat(1, B)
        self.further_T = torch.arange(2, device=device)[:, None].repeat(1, shape.num_rows)
        self.expert_ids_T: Tensor | None = None
        self.sizes = B * width, B, B * max_depth, shape.num_rows
        self.result = torch.zeros(sum(self.sizes), dtype=torch.int64, device=device)
        self._loaded: Batch | None = padding

    def load(self, batch: Batch) -> None:
        """Upload a batch, unless it is loaded already."""
        if self._loaded is not batch:
            packed = torch.from_numpy(_packed(batch))
            if self.packed.is_cuda:
                packed = packed.pin_memory()
            self.packed.copy_(packed, non_blocking=True)
            self._loaded = batch

    def unpack(self, result: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(tokens_B, count_B, drafts_B, no_valid_token_T) of `result`, on the device or the host."""
        tokens, counts, drafts, no_valid_token = result.split(list(self.sizes))
        C = self.shape.num_seqs
        return tokens.view(C, -1), counts, drafts.view(C, self.sizes[2] // C), no_valid_token


class DecodeSteps:
    """Runs decoding steps by replaying `graphs`; missing ones are captured."""

    def __init__(
        self,
        passes: Passes,
        cache: KVCache,
        slots: SlotState,
        sampler: Sampler,
        drafter: Drafter | None,
        graphs: Graphs,
        context_buckets: Sequence[int],
        routing: RoutingRecord | None = None,
    ):
        self.passes, self.cache, self.slots, self.sampler, self.drafter = passes, cache, slots, sampler, drafter
        self.graphs, self.context_buckets, self.routing = graphs, context_buckets, routing
        self._buffers: dict[Shape, Buffers] = {}
        self._is_warm = False

    def run(self, batch: Batch, shape: Shape, max_end: int, draft_depth: int) -> tuple[Buffers, Sampled | None]:
        """Enqueue a step. Its results are in the buffers, except for what is reported of tokens."""
        self.graphs.forget_if_moved()
        buffers, context_bucket = self.buffers(shape), context_bucket_of(max_end, self.context_buckets)
        buffers.load(batch)
        tables, found = self.sampler.tables, None
        wanted = tables.features_of(batch.sample_slot_T)
        self._do(buffers, ("target", shape, context_bucket), lambda: self._target(buffers, context_bucket))
        if wanted in KINDS:
            self._do(buffers, ("sample", shape, wanted), lambda: self._sample(buffers, wanted, batch.sample_slot_T))
        else:
            found = self._sample(buffers, None, batch.sample_slot_T)
        if draft_depth:
            kind = tables.features_of(batch.sampling_slot_B) & ~(Feature.PERMITTED | REPORTS | Feature.TEMPERED)
            if kind in KINDS and draft_depth == shape.depth:
                key = "draft", shape, context_bucket, kind
                self._do(
                    buffers, key, lambda: self._draft(buffers, context_bucket, draft_depth, kind, batch.sampling_slot_B)
                )
            else:
                self._draft(buffers, context_bucket, draft_depth, None, batch.sampling_slot_B)
        return buffers, found

    def run_eagerly(self, buffers: Buffers, max_end: int) -> None:
        """Run the target's piece without a graph."""
        self._target(buffers, context_bucket_of(max_end, self.context_buckets))

    def run_padding(self, num_seqs: Sequence[int], depths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Run the pieces without graphs, on padding; yields (done, all). Kernels depend on context bucket or rows, not
        on both, so not every pair is run."""
        shapes = _shapes(num_seqs, depths)
        for done, shape in enumerate(shapes, start=1):
            buffers = self.buffers(shape)
            for context_bucket in self.context_buckets if done in (1, len(shapes)) else self.context_buckets[-1:]:
                self._target(buffers, context_bucket)
                if shape.depth:
                    self._draft(buffers, context_bucket, shape.depth, KINDS[0], buffers.padding.sampling_slot_B)
            self._sample(buffers, KINDS[0], buffers.padding.sample_slot_T)
            yield done, len(shapes)
        self._is_warm = True

    def capture_all(self, num_seqs: Sequence[int], depths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Capture graphs for these numbers of sequences and depths, the largest first; yields (done, all). Kernels must
        have been compiled.

        It captures the smallest context buckets and greedy sampling; every other graph is captured before its first
        step. Random sampling uses only torch's kernels: its first step takes milliseconds longer.
        """
        shapes = _shapes(num_seqs, depths)
        for done, shape in enumerate(shapes, start=1):
            self.graphs.forget_if_moved()
            buffers = self.buffers(shape)
            slots, rows = buffers.padding.sampling_slot_B, buffers.padding.sample_slot_T
            for context_bucket in reversed(self.context_buckets[:_NEAR]):
                self._graph(
                    buffers,
                    ("target", shape, context_bucket),
                    partial(self._target, buffers, context_bucket),
                    warm=False,
                )
                if shape.depth:
                    draft = partial(self._draft, buffers, context_bucket, shape.depth, KINDS[0], slots)
                    self._graph(buffers, ("draft", shape, context_bucket, KINDS[0]), draft, warm=False)
            sample = partial(self._sample, buffers, KINDS[0], rows)
            self._graph(buffers, ("sample", shape, KINDS[0]), sample, warm=False)
            yield done, len(shapes)

    def buffers(self, shape: Shape) -> Buffers:
        """The buffers of a shape, allocated on first use."""
        if shape not in self._buffers:
            num_slots = len(self.slots.len_Y)
            padding = padding_batch(shape.num_rows, shape.num_seqs, num_slots - 1, decodes_only=True)
            like_D = self.passes.model.model.norm.weight.detach()
            self._buffers[shape] = Buffers(shape, padding, like_D, self.slots.max_depth)
        return self._buffers[shape]

    def _target(self, b: Buffers, context_bucket: int) -> None:
        on = b.on
        if b.shape.depth:
            self.slots.assume(on.sampling_slot_B)
        rows = self.slots.rows(on.slot_T, on.start_T, on.offset_T, on.live_T)
        b.position_T.copy_(rows.position_T)
        view = self._view(b, rows, context_bucket)
        if self.routing is not None:
            self.routing.clear()
        b.hidden_TD.copy_(self.passes.hidden(rows.id_T, view))
        if self.routing is not None:
            expert_ids_T = self.routing.experts()
            if b.expert_ids_T is None:
                b.expert_ids_T = torch.empty_like(expert_ids_T)
            b.expert_ids_T.copy_(expert_ids_T)

    def _sample(self, b: Buffers, kind: int | None, slots_of_rows: Ints) -> Sampled:
        slots, on, drafts_Y = self.slots, b.on, self.slots.drafts_Y
        sample_position_T = b.position_T + 1
        rows = Rows(slots_of_rows, on.sample_slot_T, sample_position_T, on.sample_offset_T)
        logits_TW = self.passes.logits(b.hidden_TD)
        sampled = self.sampler.sample(logits_TW, rows, drafts_Y if slots.max_depth else None, features=kind)
        *committed, no_valid_token_T = b.unpack(b.result)
        no_valid_token_T.copy_(sampled.no_valid_token_T)
        if kind is None:  # penalties may count the committed tokens
            accepted = accept(sampled.token_T, on.sample_slot_T, on.sample_offset_T, drafts_Y)
            self.sampler.record(accepted, slots_of_rows)
        where = (
            on.sample_slot_T,
            on.sample_offset_T,
            sample_position_T,
            drafts_Y,
            on.sampling_slot_B,
            slots.token_YS,
            slots.len_Y,
        )
        commit_tokens(sampled.token_T, *where, CommittedTokens(*committed))
        return sampled

    def _draft(self, b: Buffers, context_bucket: int, depth: int, kind: int | None, slots_of_rows: Ints) -> None:
        assert self.drafter is not None
        on, (here_T, next_T) = b.on, b.further_T
        view = self._view(b, self.slots.rows(on.slot_T, b.position_T, here_T, on.live_T), context_bucket)
        next_ids_T = self.slots.rows(on.slot_T, b.position_T, next_T, on.live_T).id_T
        extended = self.drafter.extend(view, next_ids_T, b.hidden_TD)
        rows = DraftRows(slots_of_rows, on.sampling_slot_B, on.first_B, b.unpack(b.result)[1], b.ahead_B)
        self.drafter.draft(extended, rows, depth, max_end=context_bucket, features=kind)
        b.unpack(b.result)[2].copy_(self.slots.drafts_Y.index_select(0, on.sampling_slot_B))

    def _view(self, b: Buffers, rows: StepRows, context_bucket: int) -> StepView:
        on = b.on
        return StepView.at(
            self.cache, self.slots, rows, slot_B=on.slot_B, group_T=on.group_T.int(), max_end=context_bucket
        )

    def _do(self, buffers: Buffers, key: Hashable, piece: Piece) -> None:
        if self.graphs.captures:
            self._graph(buffers, key, piece, warm=not self._is_warm)
        self.graphs.run(key, piece)

    def _graph(self, buffers: Buffers, key: Hashable, piece: Piece, *, warm: bool) -> None:
        """Capture the graph of a piece, if it is missing. The warm-up run computes padding, so it changes no state."""
        if self.graphs.has(key):
            return
        packed = buffers.packed.clone()
        kept = [tensor.clone() for tensor in (buffers.position_T, buffers.hidden_TD, buffers.result)]
        buffers.packed.copy_(torch.from_numpy(_packed(buffers.padding)))
        self.graphs.capture(key, piece, warm=warm)
        buffers.packed.copy_(packed)
        for tensor, old in zip((buffers.position_T, buffers.hidden_TD, buffers.result), kept, strict=True):
            tensor.copy_(old)


def _shapes(num_seqs: Sequence[int], depths: Sequence[int]) -> list[Shape]:
    return [Shape(count, depth) for count in sorted(num_seqs, reverse=True) for depth in depths]


def _packed(batch: Batch) -> Ints:
    return np.concatenate(arrays(batch))
