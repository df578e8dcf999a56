"""Runs plans on a device asynchronously: rows in, tokens out. (plan.py defines how a plan is executed.)

    rows -> model -> logits -> sample -> accepted drafts -> token ids and lengths of the slots -> MTP layer -> drafts

Every tensor of a step has a static shape, given by its bucket, and the inputs of the next step stay on the device. So a
step can be enqueued before the results of the last one are read, and captured as CUDA graphs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.forward.drafting import Drafter, DraftRows, Extended
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.forward.routing import RoutingRecord
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.engine.runner.graphs.captured import Graphs
from glm5.engine.runner.graphs.decode import DecodeSteps, DeviceBatch, Shape, context_buckets_of
from glm5.engine.runner.graphs.passes import PassGraphs, can_capture
from glm5.engine.runner.graphs.prompts import PromptSteps
from glm5.engine.runner.inputs.batch import Batch, Packer, arrays, padding_batch
from glm5.engine.runner.inputs.slot_state import SlotState
from glm5.engine.runner.inputs.view import StepView
from glm5.engine.runner.native import parameters_moved
from glm5.engine.runner.result import Launched, Pending, PromptLogprobs
from glm5.engine.sampling import Accepted, Placement, Rows, Sampled, Sampler, SamplingParams, accept
from glm5.engine.sampling.logprobs import Logprobs
from glm5.engine.sampling.parts import VocabShard
from glm5.engine.scheduler.plan import Item, StepPlan
from glm5.kernels.sampled_logprobs import Kept
from glm5.kernels.upload import upload
from glm5.model.glm5 import Glm5
from glm5.parallel.group import ALONE, Group

_PROMPT_ROWS = 256  # rows of a prompt's logits that exist at a time


@dataclass(frozen=True)
class SeqSpec:
    """What a runner needs of a sequence in addition to the plan. `params` has n = 1; `seed` has 64 bits.

    `stop_ids` end it, and are masked until min_tokens; `bad_words` are token sequences. `routed`: report its experts,
    `sampling_mask`: the token ids that each of its tokens was drawn from. `prompt_masks`: the vocabularies over which
    those of its prompt but the first have their `tempered` log-probabilities, or none.
    """

    params: SamplingParams
    seed: int
    num_prompt: int
    stop_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    routed: bool = False
    sampling_mask: bool = False
    prompt_masks: Sequence[bytes] = ()


class Runner:
    """A model with its cache, its slots and its sampler. `max_depth` > 0 needs a cache with the MTP layer's keys.

    `pass_rows`: the rows of a pass in deterministic mode, None for the fastest shapes (forward/passes.py).
    `record_routing`: sequences may request the experts that computed them. `fused`: run the fused form of the model
    (fused/), and steps in pieces of static shape, captured as graphs on a GPU (graphs/decode.py, graphs/prompts.py); in
    deterministic mode, passes with FP8 weights (graphs/passes.py). Default: on a GPU.
    `group`: the ranks, each with its shard of the model. `simulate`: as in `Sampler`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Glm5,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_depth: int = 0,
        pass_rows: int | None = None,
        record_routing: bool = False,
        fused: bool | None = None,
        group: Group = ALONE,
        simulate: float | None = None,
    ):
        assert not max_depth or cache.mtp, f"{max_depth=} {cache.mtp=}"
        self.model, self.cache, self.max_depth = model, cache, max_depth
        fused = model.device.type == "cuda" if fused is None else fused
        self.passes = Passes(model, pass_rows, FusedModel(model, max_model_len, group) if fused else None)
        self.padding_slot = max_num_seqs
        self.slots = SlotState(
            max_num_seqs,
            max_model_len,
            max_depth,
            page_size=cache.page_size,
            dump_page=cache.dump_page,
            device=cache.device,
        )
        self.sampler = Sampler(
            max_num_seqs,
            model.cfg.vocab_size,
            max_drafts=max_depth,
            device=cache.device,
            part=_part(model, group),
            simulate=simulate,
        )
        self._packer = Packer(self.padding_slot, self.passes.round_up)
        self._uploaded: tuple[Batch, DeviceBatch] | None = None
        self._masks: tuple[list[int], Tensor] | None = None
        self._drafter = Drafter(self.passes, cache, self.slots, self.sampler) if max_depth else None
        self._routing = RoutingRecord(self.passes) if record_routing else None
        self.steps: DecodeSteps | None = None
        self.prompts: PromptSteps | None = None
        if fused and pass_rows is None:
            graphs = Graphs(self.passes, cache, captures=cache.device.type == "cuda")
            context_buckets = context_buckets_of(model.cfg.index_topk, max_model_len)
            around = self.passes, cache, self.slots
            self.steps = DecodeSteps(*around, self.sampler, self._drafter, graphs, context_buckets, self._routing)
            self.prompts = PromptSteps(*around, self._drafter, graphs, context_buckets, self._routing)
        self.pass_graphs: PassGraphs | None = None
        if fused and pass_rows is not None and can_capture(model):
            graphs = Graphs(self.passes, cache, captures=cache.device.type == "cuda")
            context_buckets = context_buckets_of(model.cfg.index_topk, max_model_len)
            self.pass_graphs = PassGraphs(self.passes, cache, graphs, context_buckets, self._routing)
            self.passes.captured = self.pass_graphs

    def set_bitmasks(self, slots: list[int], bitmasks: Tensor) -> None:
        """Set the grammar bitmasks of the next launch's rows (`Sampler.permit`)."""
        self._masks = slots, bitmasks

    @torch.inference_mode()
    def weights_changed(self) -> None:
        """The model's weights have changed or moved."""
        parameters_moved(self.model)
        self.passes.weights_changed()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, specs: Mapping[int, SeqSpec]) -> Launched:
        """Enqueue a step. `specs` has the sequences that enter or have rows. Call it for every plan, in order."""
        if plan.entered:
            self.slots.enter(plan.entered)
        self.slots.change(plan.table)
        self.cache.copy_pages(plan.page_copies)
        batch = self.pack(plan) if plan.items else None
        if batch is not None and (self.steps is None or not batch.samples_all):
            return self._run(plan, batch, specs)
        self._set_sampling_params(plan, specs)
        return Launched(None if batch is None else self._decode(plan, batch, specs))

    @torch.inference_mode()
    def sample_padding(self, num_rows: int) -> None:
        """Sample padding rows without a graph, to load the sampling kernels."""
        batch = padding_batch(num_rows, num_rows, self.padding_slot, decodes_only=True)
        like_D = self.model.model.norm.weight
        none_T = torch.zeros(num_rows, dtype=torch.int64, device=self.cache.device)
        self._sample(batch, self._upload(batch), none_T, like_D.new_zeros(num_rows, len(like_D)))

    def pack(self, plan: StepPlan) -> Batch:
        """The batch of a plan that has items."""
        return self._packer.pack(plan)

    def _set_sampling_params(self, plan: StepPlan, specs: Mapping[int, SeqSpec]) -> None:
        """Give the sampler the new sequences and bitmasks of this step."""
        if plan.entered:
            self.sampler.place([_placement(one.slot, one.token_ids, specs[one.seq_id]) for one in plan.entered])
        if self._masks is not None:
            # After `place`, which clears the mask of a newly taken slot.
            self.sampler.permit(*self._masks)
            self._masks = None

    def _decode(self, plan: StepPlan, batch: Batch, specs: Mapping[int, SeqSpec]) -> Pending:
        """Enqueue a step of decoding sequences only, in pieces of static shape."""
        bucket, items, steps = plan.bucket, plan.items, self.steps
        assert bucket is not None, f"{plan.step=}"
        assert steps is not None, f"{plan.step=}"
        shape, max_end = Shape(bucket.num_seqs, bucket.depth), plan.max_end + self.max_depth
        buffers, sampled = steps.run(batch, shape, max_end, plan.draft_depth if self._drafter is not None else 0)
        tokens_B, count_B, drafts_B, no_valid_token_T = buffers.unpack(buffers.result)
        pending = Pending(
            items,
            batch.sample_index_B,
            max_depth=self.max_depth,
            tokens_B=tokens_B,
            count_B=count_B,
            drafts_B=drafts_B,
            no_valid_token_T=no_valid_token_T,
            logprobs=None if sampled is None else sampled.logprobs,
            shown={} if sampled is None else _shown(items, specs),
            mask_TU=None if sampled is None else sampled.mask_TU,
            masked=frozenset() if sampled is None else _masked(items, specs),
            packed=buffers.result,
            unpack=buffers.unpack,
        )
        if buffers.expert_ids_T is not None:
            self._add_routing(pending, plan, specs, buffers.expert_ids_T, buffers.position_T)
        return pending

    def _run(self, plan: StepPlan, batch: Batch, specs: Mapping[int, SeqSpec]) -> Launched:
        """Enqueue a step with prompts, or any step without graph pieces.

        To shorten the wait for tokens, inputs that the model does not read are uploaded after its launch, and tokens
        are copied to the host before the draft layer runs.
        """
        if plan.depth:
            self.slots.assume(self._upload(batch).sampling_slot_B)
        sampling = tuple([item for item in plan.items if item.samples])
        max_end = plan.max_end  # without drafts: otherwise full prompts of index_topk tokens would select keys
        if self.prompts is not None:
            ran = self.prompts.run(batch, max_end)
            on = self._upload(batch)
            position_T, hidden_TD, expert_ids_T = ran.rows.position_T, ran.rows.hidden_TD, ran.rows.expert_ids_T
            extend = partial(self.prompts.extend, ran)
        else:
            on = self._upload(batch)
            view = self._view(on, max_end)
            position_T, expert_ids_T = view.positions_T, None
            if self._routing is not None:
                self._routing.clear()
            hidden_TD = self.passes.hidden(self.slots.tokens(on.slot_T, position_T), view)
            if self._routing is not None:
                expert_ids_T = self._routing.experts()
            extend = partial(self._extend, on, view, hidden_TD)
        self._set_sampling_params(plan, specs)
        prompt_logprobs = self._prompt_logprobs(plan, specs, hidden_TD)
        sampled, accepted = self._sample(batch, on, position_T, hidden_TD)
        pending = Pending(
            sampling,
            batch.sample_index_B,
            max_depth=self.max_depth,
            tokens_B=accepted.tokens_Y.index_select(0, on.sampling_slot_B),
            count_B=accepted.count_Y.index_select(0, on.sampling_slot_B),
            no_valid_token_T=sampled.no_valid_token_T,
            logprobs=sampled.logprobs,
            shown=_shown(sampling, specs),
            mask_TU=sampled.mask_TU,
            masked=_masked(sampling, specs),
            prompt_logprobs=prompt_logprobs,
        )
        if expert_ids_T is not None:
            self._add_routing(pending, plan, specs, expert_ids_T, position_T)
        launched = Launched(pending)
        # Without drafts, the draft layer may skip generated tokens: later drafts are then worse for a while. It must
        # not skip prompts, as their pages are shared.
        if self._drafter is not None and (plan.draft_depth or not batch.samples_all):
            extended = extend()
            if sampling:
                rows = DraftRows(
                    batch.sampling_slot_B, on.sampling_slot_B, on.first_B, accepted.count_Y[on.sampling_slot_B]
                )
                self._drafter.draft(extended, rows, plan.draft_depth, max_end=max_end + self.max_depth)
        if any(specs[item.seq_id].params.constrained for item in sampling):
            launched.add_drafts(self.slots.drafts_Y.index_select(0, on.sampling_slot_B))
        return launched

    def _extend(self, on: DeviceBatch, view: StepView, hidden_TD: Tensor) -> Extended:
        assert self._drafter is not None, f"{self.max_depth=}"
        return self._drafter.extend(view, self.slots.tokens(on.slot_T, view.positions_T + 1), hidden_TD)

    def _add_routing(
        self, pending: Pending, plan: StepPlan, specs: Mapping[int, SeqSpec], expert_ids_T: Tensor, position_T: Tensor
    ) -> None:
        pending.routed = [(item, first) for item, first in _first_rows(plan) if specs[item.seq_id].routed]
        if pending.routed:
            # Copies: the next step may overwrite these tensors.
            pending.expert_ids_T, pending.position_T = expert_ids_T.clone(), position_T.clone()

    def _view(self, on: DeviceBatch, max_end: int) -> StepView:
        return StepView.of(
            self.cache,
            self.slots,
            slot_B=on.slot_B,
            group_T=on.group_T,
            slot_T=on.slot_T,
            positions_T=self.slots.positions(on.slot_T, on.start_T, on.offset_T),
            live_T=on.live_T,
            max_end=max_end,
            invariant=self.passes.num_rows is not None,
        )

    def _sample(self, batch: Batch, on: DeviceBatch, position_T: Tensor, hidden_TD: Tensor) -> tuple[Sampled, Accepted]:
        """Sample tokens, accept or reject drafts, and commit the accepted tokens to the slots."""
        drafts_Y = self.slots.drafts_Y
        if not len(batch.sample_slot_T):
            none = torch.zeros(0, dtype=torch.int64, device=hidden_TD.device)
            return Sampled(none, none.bool(), None), accept(none, none, none, drafts_Y)
        sample_position_T = position_T
        if not batch.samples_all:
            hidden_TD, sample_position_T = hidden_TD[on.sample_T], position_T[on.sample_T]
        sample_position_T = sample_position_T + 1
        rows = Rows(batch.sample_slot_T, on.sample_slot_T, sample_position_T, on.sample_offset_T)
        sampled = self.sampler.sample(self.passes.logits(hidden_TD), rows, drafts_Y if self.max_depth else None)
        accepted = accept(sampled.token_T, on.sample_slot_T, on.sample_offset_T, drafts_Y)
        self.sampler.record(accepted, batch.sample_slot_T)
        self.slots.commit(sampled.token_T, on.sample_slot_T, sample_position_T, accepted)
        return sampled, accepted

    def _prompt_logprobs(
        self, plan: StepPlan, specs: Mapping[int, SeqSpec], hidden_TD: Tensor
    ) -> dict[int, PromptLogprobs]:
        """Log-probabilities of the prompt tokens after the rows of prompt chunks, for sequences that request them."""
        out: dict[int, PromptLogprobs] = {}
        if plan.bucket is not None and plan.bucket.decodes_only:
            return out
        for item, first in _first_rows(plan):
            params = specs[item.seq_id].params
            wanted, temperature = params.prompt_logprobs, 0.0 if params.greedy else params.temperature
            count = min(item.start + item.num_rows, specs[item.seq_id].num_prompt - 1) - item.start
            if item.kind == "decode" or wanted is None or count < 1:
                continue
            # A copy: on a CPU another sequence may get the slot before these are read.
            next_T = self.slots.token_YS[item.slot, item.start + 1 : item.start + 1 + count].clone()
            parts: list[Logprobs] = []
            for begin in range(0, count, _PROMPT_ROWS):
                span = slice(first + begin, first + min(begin + _PROMPT_ROWS, count))
                logits_TW = self.passes.logits(_filled(hidden_TD[span], self.passes))[: span.stop - span.start]
                masks = specs[item.seq_id].prompt_masks[item.start + begin :][: span.stop - span.start]
                kept = Kept.of(masks, logits_TW.device) if any(masks) else None
                parts.append(
                    self.sampler.logprobs(logits_TW, next_T[begin : begin + _PROMPT_ROWS], wanted, temperature, kept)
                )
            out[item.seq_id] = PromptLogprobs(next_T, Logprobs.joined(parts), wanted)
        return out

    def _upload(self, batch: Batch) -> DeviceBatch:
        """Upload all arrays in one copy, unless they are those of the last step."""
        if self._uploaded is None or self._uploaded[0] is not batch:
            parts = arrays(batch)
            packed = upload(np.concatenate(parts), self.cache.device)
            self._uploaded = batch, DeviceBatch(*packed.split([len(part) for part in parts]))
        return self._uploaded[1]


def _part(model: Glm5, group: Group) -> VocabShard | None:
    """The shard of the vocabulary whose logits this rank computes."""
    if group.shard.size == 1:
        return None
    size = model.cfg.vocab_size // group.shard.size
    return VocabShard(group.shard.rank * size, size, group, group.shard.rank)


def _placement(slot: int, token_ids: Sequence[int], spec: SeqSpec) -> Placement:
    return Placement(
        slot,
        spec.params,
        spec.seed,
        prompt_ids=token_ids[: spec.num_prompt],
        output_ids=token_ids[spec.num_prompt :],
        stop_ids=spec.stop_ids,
        bad_words=spec.bad_words,
        sampling_mask=spec.sampling_mask,
    )


def _shown(items: Sequence[Item], specs: Mapping[int, SeqSpec]) -> dict[int, int]:
    """By sequence with log-probabilities: how many of the likeliest tokens it requests."""
    wanted = {item.seq_id: specs[item.seq_id].params.logprobs for item in items}
    return {seq_id: count for seq_id, count in wanted.items() if count is not None}


def _masked(items: Sequence[Item], specs: Mapping[int, SeqSpec]) -> frozenset[int]:
    return frozenset([item.seq_id for item in items if specs[item.seq_id].sampling_mask])


def _first_rows(plan: StepPlan) -> list[tuple[Item, int]]:
    """Each item with the index of its first row in the batch."""
    assert plan.bucket is not None, f"{plan.step=}"
    if plan.bucket.decodes_only:
        return [(item, index * (1 + plan.bucket.depth)) for index, item in enumerate(plan.items)]
    first, out = 0, list[tuple[Item, int]]()
    for item in plan.items:
        out.append((item, first))
        first += item.num_rows
    return out


def _filled(hidden_TD: Tensor, passes: Passes) -> Tensor:
    """Pad with rows of zeros to a multiple of a pass."""
    return torch.nn.functional.pad(hidden_TD, (0, 0, 0, passes.round_up(len(hidden_TD)) - len(hidden_TD)))
