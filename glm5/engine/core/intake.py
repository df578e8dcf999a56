"""Requests before they reach the scheduler: each is checked, its grammar compiled, its prompt looked up in lower tiers.

Compilation and lookup run on other threads. A request waits here until both are done; others may overtake it. An
invalid request is refused here with the reason, and does not affect others.
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
from glm5.engine.sampling.params import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_STOP_IDS, check_prompt_masks
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import Submit, TierChange
from glm5.engine.transport.wire import AddRequest, EngineInfo


@dataclass
class Admission:
    """A request that is ready: the messages for the scheduler, and its answers."""

    submit: Submit
    replies: list[Reply]
    tier_change: TierChange | None


@dataclass
class Refusal:
    """A request that cannot be served, and the reason."""

    seq_ids: Sequence[int]
    reason: str
    param: str | None = None


@dataclass
class _Waiting:
    request: AddRequest
    submit: Submit
    compilation: Compilation | None
    lookup: Lookup | None

    def is_ready(self) -> bool:
        is_compiled = self.compilation is None or self.compilation.ready()
        return is_compiled and (self.lookup is None or self.lookup.is_over())


class Intake:
    """`add` requests; `ready` returns those that can be scheduled. `compiler`: None refuses grammars."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        info: EngineInfo,
        compiler: Compiler | None,
        tiering: Tiering | None,
    ):
        self.config, self.info, self.vocab_size = config, info, info.vocab_size
        self.compiler, self.tiering = compiler, tiering
        self._waiting: list[_Waiting] = []

    @property
    def num_waiting(self) -> int:
        """Answers of requests that are not ready."""
        return sum(len(waiting.submit.seq_ids) for waiting in self._waiting)

    @property
    def seq_ids(self) -> list[int]:
        """The answers of requests that are not ready."""
        return [seq_id for waiting in self._waiting for seq_id in waiting.request.seq_ids]

    def add(self, request: AddRequest, weights: bytes) -> Refusal | None:
        """Check a request, start its compilation and lookup. `weights`: identity of the weights in use."""
        try:
            submit = _submit(request)
            self._check(request, submit)
            grammar, compilation = request.params.structured_outputs, None
            if grammar is not None:
                if self.compiler is None:
                    raise RequestError(
                        "structured_outputs need a tokenizer, and this engine has none", param="structured_outputs"
                    )
                compilation = self.compiler.compile(grammar, request.salt)
        except GlmError as error:
            return Refusal(request.seq_ids, words_of(error), getattr(error, "param", None))
        lookup = self.tiering.look_up(submit, weights) if self.tiering is not None else None
        self._waiting.append(_Waiting(request, submit, compilation, lookup))
        return None

    def wait(self, timeout_s: float) -> None:
        """Wait until a request may be ready, at most `timeout_s`."""
        for waiting in self._waiting[:1]:
            for pending in (waiting.lookup, waiting.compilation):
                if pending is not None and not waiting.is_ready():
                    pending.wait(timeout_s)

    def ready(self) -> list[Admission | Refusal]:
        """Remove and return the requests that wait for nothing any more, in order of arrival."""
        if not self._waiting:
            return []
        ready = [waiting for waiting in self._waiting if waiting.is_ready()]
        if ready:
            self._waiting = [waiting for waiting in self._waiting if waiting not in ready]
        return [_admitted(waiting) for waiting in ready]

    def abort(self, seq_ids: Sequence[int] | None) -> list[int]:
        """Abort these answers (None: all). Returns those that were waiting here."""
        aborted: list[int] = []
        for waiting in list(self._waiting):
            gone = [seq_id for seq_id in waiting.request.seq_ids if seq_ids is None or seq_id in seq_ids]
            aborted += gone
            if len(gone) == len(waiting.request.seq_ids):
                self._waiting.remove(waiting)
            elif gone:
                pairs = zip(waiting.request.seq_ids, waiting.request.seeds, strict=True)
                left = [(seq_id, seed) for seq_id, seed in pairs if seq_id not in gone]
                waiting.request.seq_ids, waiting.request.seeds = (tuple(column) for column in zip(*left, strict=True))
                waiting.submit = _submit(waiting.request)
        return aborted

    def _check(self, request: AddRequest, submit: Submit) -> None:
        """RequestError for an invalid request. (Clients check too; the engine does not trust them.)"""
        self.config.check(submit)
        request.params.check_token_ids(self.vocab_size)
        _check_ids("prompt", request.prompt_ids, self.vocab_size)
        _check_ids("stop_token_ids", request.stop_ids, self.vocab_size)
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise RequestError(f"{len(request.stop_ids)} stop tokens; allowed: {MAX_STOP_IDS}", param="stop_token_ids")
        words = request.bad_words
        if len(words) > MAX_BAD_WORDS or not all(0 < len(word) <= MAX_BAD_WORD_LEN for word in words):
            allowed = f"up to {MAX_BAD_WORDS} spellings of 1 to {MAX_BAD_WORD_LEN} tokens"
            raise RequestError(f"bad_words have {len(words)} spellings; allowed: {allowed}", param="bad_words")
        for word in words:
            _check_ids("bad_words", word, self.vocab_size)
        if not request.seq_ids or len(request.seeds) != len(request.seq_ids) or request.params.n != 1:
            raise RequestError(
                f"{len(request.seq_ids)} answers, {len(request.seeds)} seeds, n={request.params.n} in each", param="n"
            )
        request.params.check_reports(self.info.max_logprobs, sampling_mask=request.sampling_mask)
        if request.prompt_masks:
            check_prompt_masks(request.prompt_masks, len(request.prompt_ids), self.vocab_size)
        if request.routed_experts and not self.info.routed_experts:
            raise RequestError(
                "routed experts are not recorded; start the engine with enable_return_routed_experts",
                param="routed_experts",
            )


def _submit(request: AddRequest) -> Submit:
    params = request.params
    return Submit(
        seq_ids=tuple(request.seq_ids),
        prompt_ids=request.prompt_ids,
        max_tokens=request.max_tokens,
        stop_ids=frozenset(request.stop_ids),
        min_tokens=params.min_tokens,
        priority=request.priority,
        salt=request.salt,
        keeps_pages=request.keeps_pages,
        needs_last_token=params.constrained,
        max_depth=request.max_depth,
        computes_prompt=params.prompt_logprobs is not None or request.routed_experts,
    )


def _admitted(waiting: _Waiting) -> Admission | Refusal:
    request, compiled = waiting.request, None
    try:
        if waiting.compilation is not None:
            compiled = waiting.compilation.result()
    except GlmError as error:
        return Refusal(request.seq_ids, words_of(error), getattr(error, "param", None))
    report = None
    if waiting.submit.computes_prompt:
        wants_logprobs = request.params.prompt_logprobs is not None
        report = PromptReport(len(request.prompt_ids), logprobs=wants_logprobs, routed=request.routed_experts)
    replies = [_reply(request, number, report, compiled) for number in range(len(request.seq_ids))]
    return Admission(waiting.submit, replies, waiting.lookup.found() if waiting.lookup is not None else None)


def _reply(request: AddRequest, number: int, report: PromptReport | None, compiled: Any) -> Reply:
    spec = SeqSpec(
        params=request.params,
        seed=request.seeds[number],
        num_prompt=len(request.prompt_ids),
        stop_ids=request.stop_ids,
        bad_words=request.bad_words,
        routed=request.routed_experts,
        sampling_mask=request.sampling_mask,
        prompt_masks=request.prompt_masks,
    )
    matcher = None
    if request.params.constrained:
        budget = request.params.thinking_token_budget
        matcher = Matcher(compiled, request.starts_after, not_before=request.not_before, budget=budget)
    return Reply(request.seq_ids[number], spec, len(request.prompt_ids), report, matcher)


def _check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError(
            f"{param} holds token ids {min(ids)} to {max(ids)}; allowed: 0 to {vocab_size - 1}", param=param
        )
