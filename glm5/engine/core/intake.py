"""Requests on their way to the scheduler: checked, their grammar compiled, their prompt looked up in lower tiers.

Compiling and looking up happen on other threads; a request waits here until both are done, and others pass it. What
cannot be served is refused here, with the reason, and harms nobody else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm5.common.errors import GlmError, RequestError, words_of
from glm5.engine.core.replies import PromptReport, Reply
from glm5.engine.core.tiering import Lookup, Tiering
from glm5.engine.runner.runner import SeqSpec
from glm5.engine.sampling.compiling import Compilation, Compiler
from glm5.engine.sampling.grammar import Matcher
from glm5.engine.sampling.params import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_STOP_IDS
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import Submit, TierChange
from glm5.engine.transport.wire import Ask


@dataclass
class Admission:
    """A request that is ready: what to tell the scheduler, and its answers."""

    submit: Submit
    replies: list[Reply]
    tier_change: TierChange | None


@dataclass
class Refusal:
    """A request that cannot be served, and why."""

    seq_ids: Sequence[int]
    reason: str
    param: str | None = None


@dataclass
class _Waiting:
    ask: Ask
    submit: Submit
    compilation: Compilation | None
    lookup: Lookup | None

    def is_ready(self) -> bool:
        is_compiled = self.compilation is None or self.compilation.ready()
        return is_compiled and (self.lookup is None or self.lookup.is_over())


class Intake:
    """`take` requests, then ask for those that are `ready`. `compiler`: None refuses grammars."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        records_routing: bool,
        compiler: Compiler | None,
        tiering: Tiering | None,
    ):
        self.config, self.vocab_size, self.records_routing = config, vocab_size, records_routing
        self.compiler, self.tiering = compiler, tiering
        self._waiting: list[_Waiting] = []

    @property
    def num_waiting(self) -> int:
        """Answers of requests that are not ready."""
        return sum(len(waiting.submit.seq_ids) for waiting in self._waiting)

    def take(self, ask: Ask, weights: bytes) -> Refusal | None:
        """Check a request and start what it needs. `weights`: identity of those in use."""
        try:
            submit = _submit(ask)
            self._check(ask, submit)
            grammar, compilation = ask.params.structured_outputs, None
            if grammar is not None:
                if self.compiler is None:
                    raise RequestError(
                        "structured_outputs need a tokenizer, and this engine has none", param="structured_outputs"
                    )
                compilation = self.compiler.compile(grammar, ask.salt)
        except GlmError as error:
            return Refusal(ask.seq_ids, words_of(error), getattr(error, "param", None))
        lookup = self.tiering.look_up(submit, weights) if self.tiering is not None else None
        self._waiting.append(_Waiting(ask, submit, compilation, lookup))
        return None

    def wait(self, timeout_s: float) -> None:
        """Until something may be ready, at most `timeout_s`."""
        for waiting in self._waiting[:1]:
            for pending in (waiting.lookup, waiting.compilation):
                if pending is not None and not waiting.is_ready():
                    pending.wait(timeout_s)

    def ready(self) -> list[Admission | Refusal]:
        """Requests that wait for nothing any more, in the order of their arrival."""
        if not self._waiting:
            return []
        ready = [waiting for waiting in self._waiting if waiting.is_ready()]
        if ready:
            self._waiting = [waiting for waiting in self._waiting if waiting not in ready]
        return [_admitted(waiting) for waiting in ready]

    def drop(self, seq_ids: Sequence[int] | None) -> list[int]:
        """Forget these answers (None: all); those that waited here."""
        dropped: list[int] = []
        for waiting in list(self._waiting):
            gone = [seq_id for seq_id in waiting.ask.seq_ids if seq_ids is None or seq_id in seq_ids]
            dropped += gone
            if len(gone) == len(waiting.ask.seq_ids):
                self._waiting.remove(waiting)
            elif gone:
                pairs = zip(waiting.ask.seq_ids, waiting.ask.seeds, strict=True)
                left = [(seq_id, seed) for seq_id, seed in pairs if seq_id not in gone]
                waiting.ask.seq_ids, waiting.ask.seeds = (tuple(column) for column in zip(*left, strict=True))
                waiting.submit = _submit(waiting.ask)
        return dropped

    def _check(self, ask: Ask, submit: Submit) -> None:
        """RequestError for what would fail or be wrong later. (Clients check too; the engine does not trust them.)"""
        self.config.check(submit)
        ask.params.check_token_ids(self.vocab_size)
        _check_ids("prompt", ask.prompt_ids, self.vocab_size)
        _check_ids("stop_token_ids", ask.stop_ids, self.vocab_size)
        if len(ask.stop_ids) > MAX_STOP_IDS:
            raise RequestError(f"{len(ask.stop_ids)} stop tokens; allowed: {MAX_STOP_IDS}", param="stop_token_ids")
        if len(ask.bad_words) > MAX_BAD_WORDS or not all(0 < len(word) <= MAX_BAD_WORD_LEN for word in ask.bad_words):
            allowed = f"up to {MAX_BAD_WORDS} spellings of 1 to {MAX_BAD_WORD_LEN} tokens"
            raise RequestError(f"bad_words have {len(ask.bad_words)} spellings; allowed: {allowed}", param="bad_words")
        for word in ask.bad_words:
            _check_ids("bad_words", word, self.vocab_size)
        if not ask.seq_ids or len(ask.seeds) != len(ask.seq_ids) or ask.params.n != 1:
            raise RequestError(
                f"{len(ask.seq_ids)} answers, {len(ask.seeds)} seeds, n={ask.params.n} in each", param="n"
            )
        if ask.routed_experts and not self.records_routing:
            raise RequestError(
                "routed experts are not recorded; start the engine with enable_return_routed_experts",
                param="routed_experts",
            )


def _submit(ask: Ask) -> Submit:
    params = ask.params
    return Submit(
        seq_ids=tuple(ask.seq_ids),
        prompt_ids=ask.prompt_ids,
        max_tokens=ask.max_tokens,
        stop_ids=frozenset(ask.stop_ids),
        min_tokens=params.min_tokens,
        priority=ask.priority,
        salt=ask.salt,
        needs_last_token=params.constrained,
        max_depth=ask.max_depth,
        computes_prompt=params.prompt_logprobs is not None or ask.routed_experts,
    )


def _admitted(waiting: _Waiting) -> Admission | Refusal:
    ask, compiled = waiting.ask, None
    try:
        if waiting.compilation is not None:
            compiled = waiting.compilation.result()
    except GlmError as error:
        return Refusal(ask.seq_ids, words_of(error), getattr(error, "param", None))
    report = None
    if waiting.submit.computes_prompt:
        wants_logprobs = ask.params.prompt_logprobs is not None
        report = PromptReport(len(ask.prompt_ids), logprobs=wants_logprobs, routed=ask.routed_experts)
    replies = [_reply(ask, number, report, compiled) for number in range(len(ask.seq_ids))]
    return Admission(waiting.submit, replies, waiting.lookup.found() if waiting.lookup is not None else None)


def _reply(ask: Ask, number: int, report: PromptReport | None, compiled: Any) -> Reply:
    spec = SeqSpec(
        params=ask.params,
        seed=ask.seeds[number],
        num_prompt=len(ask.prompt_ids),
        stop_ids=ask.stop_ids,
        bad_words=ask.bad_words,
        routed=ask.routed_experts,
    )
    matcher = None
    if ask.params.constrained:
        budget = ask.params.thinking_token_budget
        matcher = Matcher(compiled, ask.starts_after, not_before=ask.not_before, budget=budget)
    return Reply(ask.seq_ids[number], spec, len(ask.prompt_ids), report, matcher)


def _check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError(
            f"{param} holds token ids {min(ids)} to {max(ids)}; allowed: 0 to {vocab_size - 1}", param=param
        )
