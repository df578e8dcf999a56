"""The engine's loop: messages in, steps planned and launched, results read, updates out.

    an iteration:  messages -> plan step i -> launch it -> read step i-1 -> apply its tokens -> updates

With `launch_ahead` a step is launched before the tokens of the previous one are read, so the device never waits for
the host. Without, each step is read before the next is planned; the tokens are the same. Other slow work (grammars,
copies of pages, reading weights) runs on other threads and is polled at the start of an iteration.

One thread calls everything here. An exception that leaves `step` ends the engine: state and device may disagree.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from glm5.common.errors import GlmError, words_of
from glm5.engine.cache.changes import CacheChanges
from glm5.engine.core.control import Control
from glm5.engine.core.depth import AdaptiveDepth
from glm5.engine.core.grammars import fill_masks
from glm5.engine.core.intake import Admission, Intake, Refusal
from glm5.engine.core.interfaces import Followers, Launched, Memory, StepRunner, WeightSource
from glm5.engine.core.pace import PromptPace, furthest_prompt
from glm5.engine.core.profiling import Profiling
from glm5.engine.core.replies import PromptReport, Reply, column, note_prompts
from glm5.engine.core.stats import Counters, stats
from glm5.engine.core.tiering import Tiering
from glm5.engine.runner.result import StepResult
from glm5.engine.runner.runner import SeqSpec
from glm5.engine.sampling.compiling import Compiler
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import Abort, Finish, Message, Resume, SetDepth, SetPromptShare, Submit
from glm5.engine.scheduler.plan import Output, StepPlan
from glm5.engine.scheduler.scheduler import Scheduler
from glm5.engine.tiers.copies import CopyQueue
from glm5.engine.transport.kv_events import KvEventPublisher
from glm5.engine.transport.wire import (
    AbortRequests,
    AddRequest,
    Answer,
    Bucket,
    Close,
    EngineInfo,
    Growth,
    Join,
    Leave,
    Listen,
    ProfileCall,
    StatsCall,
    StopAnswer,
    ToClient,
    ToEngine,
    Update,
    Updates,
    client_of,
)

# How long an iteration without work waits for another thread. This also bounds how long a message waits.
MAX_WAIT_S = 0.01


class EngineCore:
    """Call `receive` with messages, and `step` while it `has_work`. `info`: sent to clients.

    `compiler` None refuses grammars, `copies` None means no tiers, `depth` None always drafts to the maximum. `pace`
    None limits prompt tokens in a step by `config` alone; otherwise a launch must be synchronous, since `clock` times
    it. `ranks`: the other ranks; they receive every message that the scheduler receives. `kv_events`: where changes of
    the prefix tree and of the tiers are published.
    """

    def __init__(
        self,
        runner: StepRunner,
        config: SchedulerConfig,
        info: EngineInfo,
        *,
        weights: WeightSource,
        cache: Memory,
        compiler: Compiler | None = None,
        copies: CopyQueue | None = None,
        depth: AdaptiveDepth | None = None,
        pace: PromptPace | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ranks: Followers | None = None,
        kv_events: KvEventPublisher | None = None,
    ):
        self.ranks, self._kv_events = ranks, kv_events
        self.runner, self.config, self.info = runner, config, info
        self.scheduler = Scheduler(config, version=weights.version, identity=weights.identity)
        changes = self.scheduler.page_manager.tree.changes = None if kv_events is None else CacheChanges()
        self._changes = changes
        self.weights, self.compiler, self.depth = weights, compiler, depth
        self.pace, self._clock = pace, clock
        self.counters = Counters(config.max_depth)
        self.tiering = Tiering(copies, config.page_size) if copies is not None else None
        self.intake = Intake(
            config,
            info=info,
            compiler=compiler,
            tiering=self.tiering,
        )
        self.control = Control(
            self, weights=weights, cache=cache, tiering=self.tiering, weights_changed=runner.weights_changed
        )
        self._profiling = Profiling()
        self._inbox: deque[ToEngine] = deque()
        self._messages: list[Message] = []
        self._updates: list[Update] = []
        self._growth: Growth | None = None
        self._results: list[ToClient] = []
        self._answers: list[ToClient] = []
        # Answers under way. A prompt's report may outlive the answer that computes it.
        self._replies: dict[int, Reply] = {}
        self._specs: dict[int, SeqSpec] = {}
        self._reports: dict[int, PromptReport] = {}
        self._constrained: dict[int, Reply] = {}
        # Answers of which all that can be said until their end is their tokens.
        self._plain: set[int] = set()
        self._unread: deque[tuple[StepPlan, int, Launched, float]] = deque()
        self._last_read = 0.0
        self._draft_depth = config.max_depth
        self._wait: str | None = "requests"

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything. If not, nothing changes before the next message."""
        is_at_rest = self._wait in ("requests", "pause")
        return (
            bool(self._inbox or self._messages or self._unread or self.intake.num_waiting or self.control.is_busy)
            or not is_at_rest
        )

    @property
    def is_still(self) -> bool:
        return self._wait == "pause"

    def receive(self, message: ToEngine) -> None:
        """Queue a message; the next step handles it."""
        self._inbox.append(message)

    def step(self) -> list[ToClient]:
        """Run one iteration. It waits for the device as long as a step takes, for other work at most `MAX_WAIT_S`."""
        self._receive_all()
        begins = any(isinstance(message, Submit | Resume) for message in self._messages)
        self.control.take_changes(closely=begins)
        plan = self._plan()
        self._launch(plan)
        num_unread = 1 if self.config.launch_ahead and plan.items else 0
        has_read = len(self._unread) > num_unread
        while len(self._unread) > num_unread:
            self._read(*self._unread.popleft())
        self._wait = plan.wait
        if self._kv_events is not None and self._changes is not None and (changes := self._changes.take()):
            self._kv_events.publish(changes)
        if not plan.items and not has_read:
            self._sleep_until_something_ends()
        return self._outgoing()

    def send_to_scheduler(self, *messages: Message) -> None:
        """Queue messages for the scheduler; the next plan applies them."""
        self._messages += messages

    def abort(self, seq_ids: tuple[int, ...] | None) -> None:
        """Abort answers (None: all)."""
        for seq_id in self.intake.abort(seq_ids):
            self._emit(Update(seq_id, [], self.scheduler.version, "abort"))
        self.send_to_scheduler(Abort(seq_ids))

    def stats(self) -> dict[str, Any]:
        """The answer to `StatsCall` (stats.py)."""
        tiers = self.tiering.copies.stats() if self.tiering is not None else None
        return stats(
            self.counters,
            self.scheduler,
            num_held=self.intake.num_waiting,
            tiers=tiers,
            is_sleeping=self.control.is_sleeping,
            is_torn=self.control.is_torn,
            last_push=self.control.last_push,
            simulated_acceptance=self.info.simulated_acceptance,
        )

    def close(self, flush_s: float = 30.0) -> None:
        """End the threads, after waiting at most `flush_s` for pages to be written to disk."""
        if self.tiering is not None:
            self.tiering.close(flush_s)
        if self.compiler is not None:
            self.compiler.close()
        if self.ranks is not None:
            self.ranks.close()
        if self._kv_events is not None:
            self._kv_events.close()

    def _receive_all(self) -> None:
        """Handle everything that arrived since the last iteration."""
        if self.tiering is not None:
            self._messages += self.tiering.messages()
        for ready in self.intake.ready():
            self._admit(ready)
        while self._inbox:
            self._handle(self._inbox.popleft())
        self.control.advance()
        self._answers += self.control.answers
        self.control.answers.clear()

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self.counters.requests += 1
                refusal = self.intake.add(message, self.scheduler.page_manager.weights)
                for ready in [refusal] if refusal is not None else self.intake.ready():
                    self._admit(ready)
            case AbortRequests(seq_ids=seq_ids):
                self.abort(seq_ids)
            case Leave(client=client):
                running = (*self._replies, *self.intake.seq_ids)
                self.abort(tuple(seq_id for seq_id in running if client_of(seq_id) == client))
                self.control.leave(client)
            case StopAnswer(seq_id=seq_id):
                # The client has ended it: no update follows, whatever is still computed.
                self.intake.abort((seq_id,))
                if self._drop_reply(seq_id):
                    self.counters.finished["stop"] += 1
                    self.send_to_scheduler(Finish(seq_id))
            case StatsCall(call_id=call_id):
                self._answers.append(Answer(call_id, self.stats()))
            case Bucket():
                self.control.add_bucket(message)
            case ProfileCall():
                self._answers.append(self._profile(message))
            case Close() | Listen() | Join():
                raise AssertionError(f"{message} is handled by the process")
            case _:
                self.control.add(message)

    def _profile(self, call: ProfileCall) -> Answer:
        try:
            if call.folder is not None:
                self._profiling.start(call.folder)
                return Answer(call.call_id)
            return Answer(call.call_id, {"path": self._profiling.stop()})
        except GlmError as error:
            return Answer(call.call_id, error=words_of(error))

    def _admit(self, ready: Admission | Refusal) -> None:
        if isinstance(ready, Refusal):
            for seq_id in ready.seq_ids:
                self._emit(Update(seq_id, [], self.scheduler.version, "error", ready.reason, param=ready.param))
            return
        for reply in ready.replies:
            self._replies[reply.seq_id] = reply
            self._specs[reply.seq_id] = reply.spec
            if reply.report is not None:
                self._reports[reply.seq_id] = reply.report
            if reply.matcher is not None:
                self._constrained[reply.seq_id] = reply
        if ready.tier_change is not None:
            self.send_to_scheduler(ready.tier_change)
        self.send_to_scheduler(ready.submit)

    def _plan(self) -> StepPlan:
        scheduler = self.scheduler
        if self.depth is not None and (num_seqs := self._num_decoding_soon()):
            depth = self.depth.choose(num_seqs)
            if depth != scheduler.depth:
                self.send_to_scheduler(SetDepth(depth))
        if self.pace is not None and scheduler.decoding:
            start = furthest_prompt(scheduler, self._messages)
            if start is not None:
                self.send_to_scheduler(SetPromptShare(self.pace.choose(len(scheduler.decoding), start)))
        messages, self._messages = self._messages, []
        if self.ranks is not None:
            self.ranks.broadcast(scheduler.next_step, messages, self._specs, is_masked=bool(self._constrained))
        scheduler.deliver(scheduler.next_step, messages)
        plan = scheduler.plan(scheduler.next_step)
        self.counters.count_plan(plan)
        for output in plan.ended:
            self._report(output, plan)
        for seq_id, versions in plan.key_versions.items():
            if (reply := self._replies.get(seq_id)) is not None:
                runs = [(version, len(list(of))) for version, of in groupby(versions)]
                reply.key_versions, reply.is_plain = (plan.version, runs), False
                self._plain.discard(seq_id)
        for entered in plan.entered:
            if entered.donor_slot is None and (report := self._reports.get(entered.seq_id)) is not None:
                report.restart()
        return plan

    def _num_decoding_soon(self) -> int:
        """Sequences that decode, or will once their prompts are computed, including new ones."""
        num_new = sum([len(message.seq_ids) for message in self._messages if isinstance(message, Submit)])
        return min(len(self.scheduler.live) + num_new, self.config.max_num_seqs)

    def _launch(self, plan: StepPlan) -> None:
        if self.tiering is not None:
            self.tiering.begin_stores(plan)
        if self._constrained and plan.items:
            filled = fill_masks(plan.items, self._constrained, self.config.max_depth, self.info.vocab_size)
            if filled is not None:
                self.runner.set_bitmasks(*filled)
        for item in reversed(plan.items):
            if item.kind != "prefill":
                break
            reply = self._replies.get(item.seq_id)
            if reply is not None and reply.num_cached is None:
                reply.num_cached = min(item.start, reply.spec.num_prompt)
                reply.began = time.monotonic()
        launched_at, began = time.perf_counter(), self._clock()
        launched = self.runner.launch(plan, self._specs)
        if self.pace is not None and plan.items:
            self.pace.observe(plan.items, self._clock() - began)
        if plan.items:
            self._unread.append((plan, self._draft_depth, launched, launched_at))
            self._draft_depth = plan.draft_depth
        if self.tiering is not None:
            self.tiering.begin_loads(plan)

    def _read(self, plan: StepPlan, draft_depth: int, launched: Launched, launched_at: float) -> None:
        """Read and apply a launched step. `draft_depth`: the depth at which the step before it drafted."""
        result = launched.read()
        began, self._last_read = max(launched_at, self._last_read), time.perf_counter()
        self.counters.count_step(plan.items, sum(map(len, result.tokens.values())), self._last_read - began)
        note_prompts(plan.items, result, self._reports)
        outputs = self.scheduler.apply(plan.step, result.tokens)
        if result.no_valid_token or not self._plain.issuperset(outputs.seq_ids):
            for output in outputs.running():
                self._report(output, plan, result)
        elif outputs.seq_ids:
            self.counters.sampled += len(outputs.token_ids)
            self._growth = Growth(plan.version, outputs.seq_ids, outputs.token_ids, outputs.counts)
        if self._growth is not None:
            self._growth.logprobs = column(result.logprobs, self._growth)
            self._growth.sampling_mask = column(result.masks, self._growth)
        for output in outputs.ended:
            self._report(output, plan, result)
        self._end_results()
        # After the depth was raised, drafts beyond `draft_depth` are stale ones, which must not be counted.
        drafted = [count if position < draft_depth else 0 for position, count in enumerate(result.num_drafted)]
        accepted = [count if position < draft_depth else 0 for position, count in enumerate(result.num_accepted)]
        self.counters.count_drafts(drafted, accepted)
        if self.depth is not None:
            self.depth.observe(drafted, accepted)

    def _report(self, output: Output, plan: StepPlan, result: StepResult | None = None) -> None:
        """Queue the new tokens of an answer, unless the answer was ended already. `result`: of the step that sampled
        them; None if `output` ends the answer without a step."""
        seq_id, token_ids, reason = output
        reply = self._replies.get(seq_id)
        if result is not None and seq_id in result.no_valid_token:
            self._fail(output, _why_no_valid_token(self._specs[seq_id].params))
            return
        if seq_id in self._plain and reason is None:
            self.counters.sampled += len(token_ids)
            self._grow(seq_id, token_ids, plan.version)
            return
        if reply is not None:
            if reply.matcher is not None and result is not None:
                if not reply.matcher.advance(token_ids):
                    self._fail(output, "the answer left its grammar, which is a bug")
                    return
                if reply.matcher.is_slow:
                    self._fail(output, "structured_outputs takes too long for each token; simplify it")
                    return
                reply.drafts = result.drafts[seq_id] if self.config.max_depth else ()
            self.counters.count_output(output)
            self._updates.append(reply.update(token_ids, plan.version, reason, result))
            if reply.is_plain:
                self._plain.add(seq_id)
        if reason is not None:
            self._forget(seq_id)

    def _grow(self, seq_id: int, token_ids: Sequence[int], version: int) -> None:
        growth = self._growth
        if growth is None:
            growth = self._growth = Growth(version, [], [], [])
        growth.seq_ids.append(seq_id)
        growth.token_ids += token_ids
        growth.counts.append(len(token_ids))

    def _fail(self, output: Output, why: str) -> None:
        """End an answer with an error, and discard its last tokens."""
        seq_id = output.seq_id
        if seq_id in self._replies:
            self._emit(Update(seq_id, [], self.scheduler.version, "error", why))
        if output.reason is None:
            self.send_to_scheduler(Finish(seq_id, "error"))
            self._drop_reply(seq_id)
        else:
            self._forget(seq_id)

    def _forget(self, seq_id: int) -> None:
        """Drop the state of a sequence that the scheduler has removed."""
        self._drop_reply(seq_id)
        self._specs.pop(seq_id, None)
        self._reports.pop(seq_id, None)

    def _drop_reply(self, seq_id: int) -> bool:
        """No more updates of this answer. Returns whether there would have been any."""
        self._plain.discard(seq_id)
        self._constrained.pop(seq_id, None)
        return self._replies.pop(seq_id, None) is not None

    def _emit(self, update: Update) -> None:
        """Queue an update that ends an answer without tokens."""
        assert update.finish_reason is not None
        self.counters.finished[update.finish_reason] += 1
        self._updates.append(update)

    def _sleep_until_something_ends(self) -> None:
        """Nothing was launched or read: wait briefly for the thread whose result is needed next."""
        if self._wait == "copies":
            assert self.tiering is not None
            self._messages += self.tiering.messages(MAX_WAIT_S)
        elif self.intake.num_waiting:
            self.intake.wait(MAX_WAIT_S)
        else:
            self.control.wait(MAX_WAIT_S)

    def _end_results(self) -> None:
        """Put what is known of answers into one message: a step's results, since it has one version of the weights."""
        growth = self._growth
        if growth is not None and len(growth.token_ids) == len(growth.seq_ids):
            growth.counts = []
        if self._updates or growth is not None:
            self._results.append(Updates(self._updates, growth))
        self._updates, self._growth = [], None

    def _outgoing(self) -> list[ToClient]:
        self._end_results()
        messages = self._results + self._answers
        self._results, self._answers = [], []
        return messages


def _why_no_valid_token(params: SamplingParams) -> str:
    """An error that names the parameters which may have masked every token."""
    names = ("structured_outputs", "allowed_token_ids", "logit_bias", "bad_words", "thinking_token_budget")
    masking = [name for name in names if getattr(params, name) not in (None, (), {})]
    if params.min_tokens:
        masking.append("min_tokens")
    if not masking:
        return "no token is possible: the model's logits are not finite numbers"
    return f"no token is possible: {', '.join(masking)} together leave none"
