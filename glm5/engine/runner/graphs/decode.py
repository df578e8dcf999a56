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
from glm5.engine.runner.inputs.batch import Batch, Ints, arrays
from glm5.engine.runner.inputs.slot_state import SlotState
from glm5.engine.runner.inputs.view import StepView
from glm5.engine.sampling import Rows, Sampled, Sampler, accept
from glm5.engine.sampling.params import Feature
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
    group_R: Tensor
    slot_R: Tensor
    start_R: Tensor
    offset_R: Tensor
    live_R: Tensor
    sample_Q: Tensor
    sample_slot_Q: Tensor
    sample_offset_Q: Tensor
    slot_C: Tensor
    first_C: Tensor
    place_C: Tensor
    first_R: Tensor


class Buffers:
    """Inputs and outputs of one shape. `result`: tokens [C, J], counts [C], drafts [C, K], rows without a token [R]."""

    def __init__(self, shape: Shape, padding: Batch, like_D: Tensor, max_depth: int):
        device, C, J = like_D.device, shape.num_seqs, 1 + max_depth
        self.shape, self.padding = shape, padding
        self.packed = torch.from_numpy(_packed(padding)).to(device)
        self.on = DeviceBatch(*self.packed.split([len(part) for part in arrays(padding)]))
        self.position_R = torch.zeros(shape.num_rows, dtype=torch.int64, device=device)
        self.hidden_RD = like_D.new_zeros(shape.num_rows, like_D.shape[-1])
        # -1 for the last known token, then the offset from it at which each further draft is made.
        self.ahead_KC = torch.arange(-1, max(1, max_depth), device=device)[:, None].repeat(1, C)
        self.further_KR = torch.arange(2, device=device)[:, None].repeat(1, shape.num_rows)
        self.expert_RLA: Tensor | None = None
        self.sizes = C * J, C, C * max_depth, shape.num_rows
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
        """(token_CJ, count_C, draft_CK, no_valid_token_R) of `result`, on the device or the host."""
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
        """Enqueue a step. Its results are in the buffers, except for log-probabilities."""
        self.graphs.forget_if_moved()
        buffers, context_bucket = self.buffers(shape), context_bucket_of(max_end, self.context_buckets)
        buffers.load(batch)
        tables, found = self.sampler.tables, None
        wanted = tables.features_of(batch.sample_slot_Q)
        self._do(buffers, ("target", shape, context_bucket), lambda: self._target(buffers, context_bucket))
        if wanted in KINDS:
            self._do(buffers, ("sample", shape, wanted), lambda: self._sample(buffers, wanted, batch.sample_slot_Q))
        else:
            found = self._sample(buffers, None, batch.sample_slot_Q)
        if draft_depth:
            kind = tables.features_of(batch.slot_C) & ~(Feature.PERMITTED | Feature.LOGPROBS | Feature.TEMPERED)
            if kind in KINDS and draft_depth == shape.depth:
                key = "draft", shape, context_bucket, kind
                self._do(buffers, key, lambda: self._draft(buffers, context_bucket, draft_depth, kind, batch.slot_C))
            else:
                self._draft(buffers, context_bucket, draft_depth, None, batch.slot_C)
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
                    self._draft(buffers, context_bucket, shape.depth, KINDS[0], buffers.padding.slot_C)
            self._sample(buffers, KINDS[0], buffers.padding.sample_slot_Q)
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
            slots, rows = buffers.padding.slot_C, buffers.padding.sample_slot_Q
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
            padding = padding_batch(shape, len(self.slots.len_S) - 1)
            like_D = self.passes.model.model.norm.weight.detach()
            self._buffers[shape] = Buffers(shape, padding, like_D, self.slots.max_depth)
        return self._buffers[shape]

    def _target(self, b: Buffers, context_bucket: int) -> None:
        on = b.on
        if b.shape.depth:
            self.slots.assume(on.slot_C)
        rows = self.slots.rows(on.slot_R, on.start_R, on.offset_R, on.live_R)
        b.position_R.copy_(rows.position_T)
        view = self._view(b, rows, context_bucket)
        if self.routing is not None:
            self.routing.clear()
        b.hidden_RD.copy_(self.passes.hidden(rows.id_T, view))
        if self.routing is not None:
            expert_RLA = self.routing.experts()
            if b.expert_RLA is None:
                b.expert_RLA = torch.empty_like(expert_RLA)
            b.expert_RLA.copy_(expert_RLA)

    def _sample(self, b: Buffers, kind: int | None, slots_of_rows: Ints) -> Sampled:
        slots, on, draft_SK = self.slots, b.on, self.slots.draft_SK
        position_Q = b.position_R + 1
        rows = Rows(slots_of_rows, on.sample_slot_Q, position_Q, on.sample_offset_Q)
        logits_QW = self.passes.logits(b.hidden_RD)
        sampled = self.sampler.sample(logits_QW, rows, draft_SK if slots.max_depth else None, features=kind)
        *committed, no_valid_token_R = b.unpack(b.result)
        no_valid_token_R.copy_(sampled.no_valid_token_R)
        if kind is None:  # penalties may count the committed tokens
            accepted = accept(sampled.token_R, on.sample_slot_Q, on.sample_offset_Q, draft_SK)
            self.sampler.record(accepted, slots_of_rows)
        where = on.sample_slot_Q, on.sample_offset_Q, position_Q, draft_SK, on.slot_C, slots.token_SN, slots.len_S
        commit_tokens(sampled.token_R, *where, CommittedTokens(*committed))
        return sampled

    def _draft(self, b: Buffers, context_bucket: int, depth: int, kind: int | None, slots_of_rows: Ints) -> None:
        assert self.drafter is not None
        on, (here_R, next_R) = b.on, b.further_KR
        view = self._view(b, self.slots.rows(on.slot_R, b.position_R, here_R, on.live_R), context_bucket)
        next_ids_R = self.slots.rows(on.slot_R, b.position_R, next_R, on.live_R).id_T
        extended = self.drafter.extend(view, next_ids_R, b.hidden_RD)
        rows = DraftRows(slots_of_rows, on.slot_C, on.first_C, b.unpack(b.result)[1], b.ahead_KC)
        self.drafter.draft(extended, rows, depth, max_end=context_bucket, features=kind)
        b.unpack(b.result)[2].copy_(self.slots.draft_SK.index_select(0, on.slot_C))

    def _view(self, b: Buffers, rows: StepRows, context_bucket: int) -> StepView:
        on = b.on
        return StepView.at(
            self.cache, self.slots, rows, slot_B=on.slot_B, group_T=on.group_R.int(), max_end=context_bucket
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
        kept = [tensor.clone() for tensor in (buffers.position_R, buffers.hidden_RD, buffers.result)]
        buffers.packed.copy_(torch.from_numpy(_packed(buffers.padding)))
        self.graphs.capture(key, piece, warm=warm)
        buffers.packed.copy_(packed)
        for tensor, old in zip((buffers.position_R, buffers.hidden_RD, buffers.result), kept, strict=True):
            tensor.copy_(old)


def _shapes(num_seqs: Sequence[int], depths: Sequence[int]) -> list[Shape]:
    return [Shape(count, depth) for count in sorted(num_seqs, reverse=True) for depth in depths]


def _packed(batch: Batch) -> Ints:
    return np.concatenate(arrays(batch))


def padding_batch(shape: Shape, padding_slot: int) -> Batch:
    """A batch of padding rows only."""
    C, R = shape.num_seqs, shape.num_rows

    def full(count: int, value: int = 0) -> Ints:
        return np.full(count, value, dtype=np.int64)

    return Batch(
        slot_B=full(C + 1, padding_slot),
        group_R=full(R, C),
        slot_R=full(R, padding_slot),
        start_R=full(R),
        offset_R=full(R),
        live_R=full(R),
        sample_Q=np.arange(R),
        sample_slot_Q=full(R, padding_slot),
        sample_offset_Q=full(R),
        slot_C=full(C, padding_slot),
        first_C=full(C),
        place_C=full(C),
        first_R=full(0),
        samples_all=True,
        whole_prompts=False,
    )
