"""One answer as the engine reports it: updates from a step's results, and log-probabilities and experts exactly once.

A preempted sequence recomputes its tokens, and one of several answers computes their prompt for all. So
log-probabilities and experts are recorded by position, when a position is first computed. Those of the prompt are sent
with the first update of any of its answers, those of an answer's own tokens with the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm5.engine.runner.result import StepResult
from glm5.engine.runner.runner import SeqSpec
from glm5.engine.sampling.grammar import Matcher
from glm5.engine.scheduler.plan import EndReason, Item
from glm5.engine.transport.wire import Growth, RoutedExperts, TokenLogprobs, Update


class PromptReport:
    """The report on a prompt: log-probabilities of all tokens but the first, experts of all but the last.

    (Every answer computes the last token itself, and reports its experts.)
    """

    def __init__(self, num_prompt: int, *, logprobs: bool, routed: bool):
        self.is_taken = False
        self._num_rows = num_prompt - 1
        self._logprobs: list[TokenLogprobs] | None = [] if logprobs else None
        self._experts: bytearray | None = bytearray() if routed else None
        self._num_routed, self._shape = 0, (0, 0)

    @property
    def is_complete(self) -> bool:
        has_logprobs = self._logprobs is None or len(self._logprobs) == self._num_rows
        return has_logprobs and (self._experts is None or self._num_routed == self._num_rows)

    def restart(self) -> None:
        """The prompt is recomputed from its beginning, perhaps with other weights. A complete report stays."""
        if not self.is_complete:
            self._logprobs = [] if self._logprobs is not None else None
            self._experts = bytearray() if self._experts is not None else None
            self._num_routed = 0

    def add(self, start: int, logprobs: list[TokenLogprobs] | None, routed: RoutedExperts | None) -> None:
        """Add the results of a chunk that starts at position `start`."""
        if self._logprobs is not None and logprobs and start <= len(self._logprobs):
            self._logprobs += logprobs[len(self._logprobs) - start :]
        if self._experts is not None and routed is not None and routed.start <= self._num_routed < self._num_rows:
            stop = min(routed.start + routed.shape[0], self._num_rows)
            if stop > self._num_routed:
                self._experts += rows_of(routed, self._num_routed, stop)
                self._num_routed, self._shape = stop, routed.shape[1:]

    def take(self) -> tuple[list[TokenLogprobs] | None, RoutedExperts | None]:
        """The report, on the first call after it is complete; (None, None) otherwise."""
        if self.is_taken or not self.is_complete:
            return None, None
        self.is_taken = True
        logprobs, self._logprobs = self._logprobs, None
        experts, self._experts = self._experts, None
        if not experts:
            return logprobs, None
        return logprobs, RoutedExperts(0, (self._num_routed, *self._shape), bytes(experts))


@dataclass(slots=True)
class Reply:
    """One answer under way. `drafts`: those of its next step, for its grammar.

    `num_tokens` includes the prompt, and is counted until the answer `is_plain`. `num_cached`: prompt tokens found in a
    cache. `began`: when its first step was launched. `num_routed`: tokens whose experts were reported. `is_plain`:
    until its end, all that can be said of it is its tokens, and what is reported of each (`Growth`). `key_versions`:
    for the next update under weights of the version before it.
    """

    seq_id: int
    spec: SeqSpec
    num_tokens: int
    report: PromptReport | None = None
    matcher: Matcher | None = None
    drafts: Sequence[int] = ()
    num_cached: int | None = None
    began: float | None = None
    is_begun: bool = False
    is_plain: bool = False
    num_routed: int = 0
    key_versions: tuple[int, list[tuple[int, int]]] | None = None

    def __post_init__(self) -> None:
        self.num_routed = self.spec.num_prompt - 1

    def update(
        self, token_ids: Sequence[int], version: int, reason: EndReason | None, result: StepResult | None
    ) -> Update:
        """The update for the tokens that were committed, with their part of the step's results. `result` is None if the
        answer was ended from outside."""
        self.num_tokens += len(token_ids)
        update = Update(self.seq_id, list(token_ids), version, reason)
        if result is None:
            return update
        if not self.is_begun:
            self.is_begun, update.num_cached, update.began = True, self.num_cached, self.began
        if self.key_versions is not None and self.key_versions[0] == version:
            update.key_versions, self.key_versions = self.key_versions[1], None
        if self.spec.params.logprobs is not None:
            update.logprobs = result.logprobs[self.seq_id][: len(token_ids)]
        if self.spec.sampling_mask:
            update.sampling_mask = result.masks[self.seq_id][: len(token_ids)]
        if self.report is not None:
            update.prompt_logprobs, update.routed = self.report.take()
            if self.spec.routed:
                own = self._own_experts(result.routed.get(self.seq_id))
                update.routed = update.routed.then(own) if update.routed and own else update.routed or own
        is_told = self.report is None or (self.report.is_taken and not self.spec.routed)
        self.is_plain = is_told and self.matcher is None and self.key_versions is None
        return update

    def _own_experts(self, routed: RoutedExperts | None) -> RoutedExperts | None:
        """Experts of this answer's tokens that were not reported yet. An answer's last token is never computed."""
        if routed is None:
            return None
        start, stop = self.num_routed, min(routed.start + routed.shape[0], self.num_tokens - 1)
        if stop <= start:
            return None
        assert routed.start <= start, f"{routed.start=} {start=}"
        self.num_routed = stop
        return RoutedExperts(start, (stop - start, *routed.shape[1:]), rows_of(routed, start, stop))


def rows_of(routed: RoutedExperts, start: int, stop: int) -> bytes:
    """Experts of tokens `start` to `stop` - 1."""
    row_bytes = 2 * routed.shape[1] * routed.shape[2]
    return routed.experts[(start - routed.start) * row_bytes : (stop - routed.start) * row_bytes]


def note_prompts(items: Sequence[Item], result: StepResult, reports: dict[int, PromptReport]) -> None:
    """Add a step's prompt results to the reports, also for an answer that has ended: other answers need them."""
    if not (result.prompt_logprobs or result.routed):
        return
    for item in items:
        report = reports.get(item.seq_id)
        if report is not None and item.kind == "prefill":
            report.add(item.start, result.prompt_logprobs.get(item.seq_id), result.routed.get(item.seq_id))


def column(reported: Mapping[int, list[Any]], growth: Growth) -> list[Any]:
    """What a step reported of each token of `growth`; empty if nothing."""
    if not any(seq_id in reported for seq_id in growth.seq_ids):
        return []
    entries: list[Any] = []
    for seq_id, count in zip(growth.seq_ids, growth.counts, strict=True):
        entries += reported[seq_id][:count] if seq_id in reported else [None] * count
    return entries
