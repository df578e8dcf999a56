"""Plans the next step. Plain Python: no tensors, no clock, no I/O; every rank runs the same scheduler.

There is no prefill phase and no decode phase: a step computes uncomputed tokens of sequences, many of a new prompt,
one and its drafts of a decoding sequence. A step has a token budget. Decoding sequences come first, then prompts, in
order of (priority, arrival); while others are waiting, one prompt gets at most half of the budget.

**Launch-ahead.** Step i+1 is planned before the tokens of step i are read. A plan therefore uses bounds: a sequence
with a step of depth k in flight gains 1 to 1 + k tokens. Pages are reserved for the upper bound, nothing is planned
beyond a certain end (`max_tokens`), and results of a sequence that turns out to have ended are discarded. With
`launch_ahead` off, results are applied before the next plan; the rules are the same.

**Pages.** A sequence runs exactly as long as it holds pages and a slot. It is admitted with pages for all its known
tokens, strictly in order. When a decoding one cannot grow, it drafts less; then the youngest running sequence
(worst priority, latest arrival) is preempted. The youngest itself skips the step instead, and keeps its pages until
older ones need them. So the oldest always proceeds, and it always fits alone: `check` refuses requests that do not.
A preempted sequence keeps its tokens, also those of a step in flight, which are read later. A waiting sequence of
better priority, not merely earlier arrival, preempts running ones to be admitted.

**Never spinning.** A plan without items states what it waits for: results not yet read, copies, `Resume`, or requests.
Anything else is an assertion error.

**Full prompts in one step.** New prompts of up to `full_prompt` tokens get steps of their own, at most every other
step while others decode, and only if together they have at least half as many tokens.

**One prompt, several answers.** The first sequence of a request computes the prompt while the others are held back.
Then they share its pages, get a copy of the last one, and compute the last token themselves.
"""

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from heapq import heappop, heappush
from operator import attrgetter

from glm5.engine.cache.prefix import PrefixStats
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import (
    Abort,
    CopyDone,
    Finish,
    Message,
    Pause,
    ResetCache,
    Resume,
    SetDepth,
    SetPromptShare,
    SetWeights,
    Submit,
    TierChange,
)
from glm5.engine.scheduler.page_manager import PageManager
from glm5.engine.scheduler.plan import EndReason, Entered, Item, Output, Outputs, StepPlan, Wait
from glm5.engine.scheduler.sequence import Group, InFlight, Sequence

_rank = attrgetter("rank")


class Scheduler:
    """`deliver` messages for a step, `plan` the step, `apply` the tokens that an earlier one sampled.

    Steps are numbered from 0. With `launch_ahead` one planned step may be unread when the next is planned, without it
    none. Schedulers with the same inputs make the same plans. `version` and `identity` are those of the weights.
    """

    def __init__(self, config: SchedulerConfig, *, version: int = 0, identity: bytes = b""):
        self.config, self.version = config, version
        self.page_manager = PageManager(config, identity, version)
        self.depth, self.max_prompt_tokens = config.max_depth, config.max_prompt_tokens
        self.next_step, self.is_paused = 0, False
        self._was_full = False  # the last step had only full prompts
        # Each is sorted by rank. Running sequences are in one of the last two.
        self.waiting: list[Sequence] = []
        self.prompting: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.live: dict[int, Sequence] = {}
        self._num_arrived = 0
        self._messages: list[tuple[int, Message]] = []
        self._unread: list[InFlight] = []
        self._free_slots = list(range(config.max_num_seqs))
        self._left: list[int] = []
        self._to_wake: list[Group] = []

    @property
    def has_work(self) -> bool:
        """Whether sequences, results or copies are outstanding."""
        return bool(self.live or self._unread or self._messages or self.page_manager.transfers.has_work)

    @property
    def running(self) -> list[Sequence]:
        return sorted(self.prompting + self.decoding, key=_rank)

    @property
    def stats(self) -> PrefixStats:
        return self.page_manager.tree.stats

    def check(self, submit: Submit) -> None:
        """RequestError for a request that cannot be served. Thread-safe."""
        self.config.check(submit)

    def deliver(self, step: int, messages: Ids[Message]) -> None:
        """Queue messages that take effect in the plan of `step`. RequestError as from `check`."""
        assert step >= self.next_step, f"too late for {step=}: {self.next_step=}"
        for message in messages:
            if isinstance(message, Submit):
                self.check(message)
        self._messages += [(step, message) for message in messages]

    def plan(self, step: int) -> StepPlan:
        """Plan `step` and reserve its pages and slots. `apply` must follow if the plan has items."""
        assert step == self.next_step, f"{step=} {self.next_step=}"
        assert len(self._unread) <= self.config.launch_ahead, f"{len(self._unread)} steps are unread"
        self.next_step += 1
        plan = StepPlan(step, self.version)
        self._wake_held()
        self._apply_messages(plan)
        plan.version = self.version
        if not self.is_paused:
            in_flight = InFlight(step)
            self._make_room_for_better(plan)
            is_full = self._plan_full_prompts(plan, in_flight)
            if not is_full:
                is_short = self._plan_decodes(plan, in_flight)
                # While pages are short, a sequence preempted for them would be admitted again at once.
                self._plan_prompts(plan, in_flight, may_admit=not is_short)
            self._was_full = is_full
            if plan.items:
                self._unread.append(in_flight)
                plan.bucket = self.config.bucket(plan)
                if self.depth:
                    plan.draft_depth = min(self.depth, in_flight.max_depth)
        if self.page_manager.transfers.has_work:
            self.page_manager.transfers.issue(plan)
        plan.table, plan.key_versions = self.page_manager.table_entries(), self.page_manager.key_versions()
        plan.left, self._left = self._left, []
        if not plan.items:
            plan.wait = self._wait()
        return plan

    def apply(self, step: int, results: Mapping[int, Ids[int]]) -> Outputs:
        """Commit the tokens that `step`, the oldest unread one, sampled: 1 to 1 + depth for each sequence, in order.

        Results of sequences that have ended are ignored, and may be missing.
        """
        assert self._unread, f"{step=} was not launched, or is read"
        in_flight = self._unread.pop(0)
        assert step == in_flight.step, f"{step=}, but {in_flight.step} is the oldest unread"
        outputs, live, size = Outputs(), self.live, self.config.page_size
        add_id, token_ids, add_count = outputs.seq_ids.append, outputs.token_ids, outputs.counts.append
        for seq, gain in zip(in_flight.decoding, in_flight.gains, strict=True):
            seq.in_flight -= 1
            if (seq_id := seq.seq_id) not in live:
                continue
            sampled, tokens = results[seq_id], seq.tokens
            count = len(sampled)
            assert 1 <= count <= gain, f"{sampled=} {gain=}"
            if seq.slot is not None and gain > 1:
                seq.min_len += count - 1
                seq.max_len += count - gain
            if len(tokens) + count >= seq.cap or not seq.stop_ids.isdisjoint(sampled):
                self._commit(seq, sampled, outputs)
                continue
            tokens += sampled
            add_id(seq_id)
            token_ids += sampled
            add_count(count)
            if seq.slot is not None:
                seq.confirmed = confirmed = len(tokens) - 1
                if confirmed // size > seq.num_in_tree:
                    self.page_manager.share_full_pages(seq)
        for seq, samples, end in in_flight.chunks:
            seq.in_flight -= 1
            if samples and seq.seq_id in live:
                self._commit(seq, results[seq.seq_id], outputs)
            elif seq.slot is not None:
                seq.confirmed = end
                self.page_manager.share_full_pages(seq)
        return outputs

    def _commit(self, seq: Sequence, sampled: Ids[int], outputs: Outputs) -> None:
        """Commit tokens that may end the sequence."""
        taken, reason = seq.commit(sampled)
        if seq.slot is not None:
            seq.confirmed = len(seq.tokens) - 1
            self.page_manager.share_full_pages(seq)
        if reason is None:
            outputs.add(seq.seq_id, taken)
        else:
            outputs.ended.append(Output(seq.seq_id, taken, reason))
            self._end(seq)

    def _apply_messages(self, plan: StepPlan) -> None:
        if not self._messages:
            return
        due = [message for step, message in self._messages if step <= plan.step]
        self._messages = [(step, message) for step, message in self._messages if step > plan.step]
        for message in due:
            self._apply_message(message, plan)
        for seq in [seq for seq in self.prompting if seq.restore is not None and seq.restore.is_over]:
            self.page_manager.finish_restore(seq)

    def _apply_message(self, message: Message, plan: StepPlan) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(seq_ids):
                for seq_id in list(self.live) if seq_ids is None else seq_ids:
                    self._end_by_message(seq_id, "abort", plan)
            case Finish(seq_id, reason):
                self._end_by_message(seq_id, reason, plan)
            case CopyDone(copy_id, tier):
                self.page_manager.transfers.end(copy_id, tier)
            case TierChange():
                self.page_manager.update_tiers(message)
            case SetDepth(depth):
                assert 0 <= depth <= self.config.max_depth, f"{depth=} {self.config.max_depth=}"
                self.depth = depth
            case SetPromptShare(max_tokens):
                self.max_prompt_tokens = max_tokens
            case Pause(release):
                self.is_paused = True
                if release:
                    self.page_manager.forget_prefixes(self.running, pure=False, keeps_tiers=True)
                    self._preempt_all(plan)
            case Resume():
                self.is_paused = False
            case SetWeights(version, recompute):
                if recompute:
                    self._preempt_all(plan)
                self.version = version
                self.page_manager.use_weights(message, self.running)
            case ResetCache():
                self.page_manager.forget_prefixes(self.running, pure=True)

    def _submit(self, submit: Submit) -> None:
        group = Group()
        for seq_id in submit.seq_ids:
            assert seq_id not in self.live, f"{seq_id=} is used twice"
            rank = (submit.priority, self._num_arrived)
            self._num_arrived += 1
            seq = Sequence(seq_id, rank, submit, self.config.max_len(submit), self.config.max_depth, group)
            group.members.append(seq)
            self.live[seq_id] = seq
            insort(self.waiting, seq, key=_rank)

    def _end_by_message(self, seq_id: int, reason: EndReason, plan: StepPlan) -> None:
        seq = self.live.get(seq_id)
        if seq is not None:
            self._end(seq)
            plan.ended.append(Output(seq_id, (), reason))

    def _preempt_all(self, plan: StepPlan) -> None:
        for seq in reversed(self.running):
            self._preempt(seq, plan)

    def _end(self, seq: Sequence) -> None:
        """Remove a sequence in any state; its pages stay in the tree."""
        del self.live[seq.seq_id]
        seq.group.members.remove(seq)
        if seq.slot is not None:
            self._leave(seq)
        elif seq in seq.group.held:
            seq.group.held.remove(seq)
        else:
            self.waiting.remove(seq)

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        self._leave(seq)
        insort(self.waiting, seq, key=_rank)
        plan.preempted.append(seq.seq_id)

    def _leave(self, seq: Sequence) -> None:
        """Release pages and slot. If others wait for the prompt that it was computing, one of them must compute it."""
        assert seq.slot is not None
        (self.decoding if seq.decodes else self.prompting).remove(seq)
        self.page_manager.release(seq)
        heappush(self._free_slots, seq.slot)
        self._left.append(seq.slot)
        seq.slot, seq.decodes, seq.item = None, False, None
        self._wake(seq.group)

    def _wake(self, group: Group) -> None:
        for seq in group.held:
            insort(self.waiting, seq, key=_rank)
        group.held.clear()

    def _wake_held(self) -> None:
        """Prompts whose last chunk was in the last plan can be shared now."""
        for group in self._to_wake:
            self._wake(group)
        self._to_wake.clear()

    def _make_room_for_better(self, plan: StepPlan) -> None:
        """Preempt running sequences of worse priority if the first waiting one can then be admitted."""
        if not (self.waiting and (self.prompting or self.decoding)):
            return
        head = self.waiting[0]
        if self._youngest().rank[0] <= head.rank[0] or head.in_flight or head.must_be_held:
            return
        running = self.running
        lower_priority = [seq for seq in running if seq.rank[0] > head.rank[0]]
        while lower_priority:
            headroom = 0 if len(lower_priority) == len(running) else self._headroom()
            found = self.page_manager.find(head, head.donor, headroom)
            if self._free_slots and not found.num_short:
                return
            if found.num_short > self.page_manager.exclusive_pages(lower_priority):
                return
            self._preempt(lower_priority.pop(), plan)
            running = self.running

    def _plan_decodes(self, plan: StepPlan, in_flight: InFlight) -> bool:
        """Plan rows for every decoding sequence that can run. Returns whether some lacked pages."""
        depth, is_short, end = self._common_depth(), False, 0
        add_item, add_decoding, add_gain = plan.items.append, in_flight.decoding.append, in_flight.gains.append
        for seq in self.decoding.copy():
            high, drafts = seq.max_len, depth
            # Most often nothing is to be decided: room for the next token, and none is certain to be the last.
            if drafts or high >= seq.cap or high > seq.covered or seq.needs_last_token:
                low, cap = seq.min_len, seq.cap
                if low >= cap or seq.slot is None or (seq.needs_last_token and seq.in_flight):
                    continue
                drafts = min(drafts, seq.max_depth, cap - low - 1)
                if high + max(0, 2 * drafts - 1) > seq.covered and seq.covered < cap - 1:
                    num_preempted = len(plan.preempted)
                    drafts = self._grow(seq, drafts, plan)
                    is_short |= drafts < 0 or len(plan.preempted) > num_preempted
                    if drafts < 0:
                        continue
            item = seq.item
            if item is None or item.depth != drafts:
                assert seq.slot is not None
                item = seq.item = Item(seq.seq_id, seq.slot, -1, 1 + drafts, drafts, "decode", samples=True)
            add_item(item)
            add_decoding(seq)
            add_gain(1 + drafts)
            seq.min_len += 1
            seq.max_len = high = high + 1 + drafts
            seq.in_flight += 1
            if high > end:
                end = high
        plan.max_end = max(0, end - 1)
        plan.num_tokens, plan.depth = sum(in_flight.gains), max(in_flight.gains, default=1) - 1
        return is_short

    def _grow(self, seq: Sequence, drafts: int, plan: StepPlan) -> int:
        """Reserve pages for a step of `seq`. Returns the drafts that the pages allow, -1 if it must skip the step.

        First it tries to cover this step's rows and those that the draft layer writes ahead for the next step.
        """
        if self.page_manager.grow(seq, min(seq.max_len + max(0, 2 * drafts - 1), seq.cap - 1)):
            return drafts
        need = min(seq.max_len, seq.cap - 1)
        while seq.covered < need and not self.page_manager.grow(seq, need):
            youngest = self._youngest()
            if youngest is seq:
                return -1
            self._preempt(youngest, plan)
        return min(drafts, seq.covered - seq.max_len) if seq.covered < seq.cap - 1 else drafts

    def _plan_full_prompts(self, plan: StepPlan, in_flight: InFlight) -> bool:
        """Plan a step that contains only full prompts, if it is their turn. Returns whether it did."""
        most = self.max_prompt_tokens if self.decoding else None
        limit, budget = self.config.full_prompt_limit(most), self.config.prompt_budget(most)
        if self._was_full and (self.decoding or any(not seq.is_full(limit) for seq in self.prompting)):
            return False
        if self.decoding and self._num_full(limit, budget) < self.config.full_prompt // 2:
            return False  # for so few tokens, an additional step costs more than faster attention gains
        chosen: list[Sequence] = []
        for seq in self.prompting:
            if seq.is_full(min(limit, budget)):
                chosen.append(seq)
                budget -= seq.goal
        while self.waiting and self._would_be_full(self.waiting[0], min(limit, budget)):
            seq = self._admit_next(plan)
            if seq is None:
                break
            chosen.append(seq)
            budget -= seq.goal
        for seq in chosen:
            self._plan_chunk(seq, seq.goal, plan, in_flight)
        return bool(chosen)

    def _num_full(self, limit: int, budget: int) -> int:
        """Tokens of prompts that could be computed in one chunk; it stops counting at `budget`."""
        count = sum(seq.goal for seq in self.prompting if seq.is_full(limit))
        for seq in self.waiting:
            if count >= budget or len(seq.tokens) > limit:
                break
            count += len(seq.tokens)
        return count

    def _would_be_full(self, seq: Sequence, limit: int) -> bool:
        """Whether a waiting prompt could be computed in one chunk: nothing of it is cached or shared."""
        if len(seq.tokens) > limit or seq.must_be_held or (donor := seq.donor) is not None:
            return False
        found = self.page_manager.find(seq, donor, self._headroom())
        return not (found.num_matched or found.lower or found.partial)

    def _plan_prompts(self, plan: StepPlan, in_flight: InFlight, *, may_admit: bool) -> None:
        """Split the rest of the budget among prompts: at most half of a step for each, then the remainder to one."""
        most = self.config.prompt_budget(self.max_prompt_tokens if plan.items else None)
        budget = min(self.config.max_tokens_per_step - plan.num_tokens, most)
        # Prompts of up to `left` tokens are left to the next step.
        left = self.config.full_prompt_limit(self.max_prompt_tokens) if self._was_full and plan.items else 0
        chunk = self.config.max_prompt_chunk or budget
        half = min(chunk, max(1, most // 2))
        shares: list[tuple[Sequence, int]] = []
        for seq in self.prompting:
            if budget and seq.restore is None and not seq.is_full(left):
                shares.append((seq, min(seq.goal - seq.computed, half, budget)))
                budget -= shares[-1][1]
        while may_admit and budget and self.waiting and len(self.waiting[0].tokens) > left:
            seq = self._admit_next(plan)
            if seq is None:
                break
            if seq.restore is None:
                shares.append((seq, min(seq.goal - seq.computed, half, budget)))
                budget -= shares[-1][1]
        unserved = [number for number, (seq, count) in enumerate(shares) if seq.computed + count < seq.goal]
        if budget and len(unserved) == 1 and not self.waiting:
            # No other sequence is waiting, so the half-budget rule protects none.
            seq, count = shares[unserved[0]]
            shares[unserved[0]] = seq, min(seq.goal - seq.computed, max(count, chunk), count + budget)
        for seq, count in shares:
            self._plan_chunk(seq, count, plan, in_flight)

    def _plan_chunk(self, seq: Sequence, count: int, plan: StepPlan, in_flight: InFlight) -> None:
        assert seq.slot is not None
        end = seq.computed + count
        samples = end == seq.goal
        plan.items.append(Item(seq.seq_id, seq.slot, seq.computed, count, 0, "prefill", samples))
        plan.num_tokens += count
        plan.max_end = max(plan.max_end, end)
        in_flight.chunks.append((seq, samples, end))
        seq.computed = end
        seq.in_flight += 1
        if samples:
            seq.min_len = seq.max_len = seq.goal + 1
            if self.depth:
                # For the rows that the draft layer writes ahead, if pages are available.
                self.page_manager.grow(seq, min(seq.goal + self.depth - 1, seq.cap - 1))
            seq.decodes = True
            self.prompting.remove(seq)
            insort(self.decoding, seq, key=_rank)
            if seq.group.held:
                self._to_wake.append(seq.group)

    def _admit_next(self, plan: StepPlan) -> Sequence | None:
        """Admit the first waiting sequence, and no other: a short one never overtakes a long one."""
        while self.waiting:
            seq = self.waiting[0]
            if seq.must_be_held:
                seq.group.held.append(self.waiting.pop(0))
                continue
            # The unread step of a preempted sequence may add tokens to it, or end it.
            if seq.in_flight or not self._free_slots:
                return None
            donor = seq.donor
            found = self.page_manager.find(seq, donor, self._headroom())
            if found.num_short:
                return None
            self.waiting.pop(0)
            self.page_manager.admit(seq, found, plan)
            seq.slot = heappop(self._free_slots)
            seq.goal = len(seq.tokens)
            seq.is_pure = seq.was_admitted = True
            insort(self.prompting, seq, key=_rank)
            hits = (seq.computed if donor is None else 0, len(found.lower) * self.config.page_size)
            donor_slot = donor.slot if donor is not None else None
            plan.entered.append(Entered(seq.seq_id, seq.slot, list(seq.tokens), tuple(seq.pages), *hits, donor_slot))
            return seq
        return None

    def _headroom(self) -> int:
        """Pages to leave for running sequences to grow; 0 if none runs, since every checked request fits alone."""
        return int(self.config.headroom * self.config.num_pages) if self.prompting or self.decoding else 0

    def _common_depth(self) -> int:
        """Drafts for each sequence within the budget, of which half is left to prompts if there are any."""
        if not (self.depth and self.decoding):
            return 0
        budget = self.config.max_tokens_per_step
        if self.prompting or self.waiting:
            budget -= budget // 2
        return max(0, min(self.depth, budget // len(self.decoding) - 1))

    def _youngest(self) -> Sequence:
        return max((queue[-1] for queue in (self.prompting, self.decoding) if queue), key=_rank)

    def _wait(self) -> Wait:
        """What a plan without items waits for."""
        if self._unread:
            return "results"
        if self.page_manager.transfers.num_in_flight:
            return "copies"
        if self.is_paused:
            return "pause"
        assert not self.live, f"{len(self.waiting)} wait, {len(self.running)} run, and nothing would move them"
        return "requests"
