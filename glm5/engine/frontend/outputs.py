"""Results of generation. Names are vLLM's: `RequestOutput` for complete answers, `Delta` for one step of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import msgspec

from glm5.engine.transport.wire import RoutedExperts, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """Natural log probability of a token under the model, and its rank among all tokens (1 = likeliest).

    In addition to vLLM's fields: `tempered`, under the distribution that was sampled from, -inf for a masked token; for
    a prompt's token, at the request's temperature (sampling/logprobs.py).
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    tempered: float | None = None


class LogprobRows(Sequence[dict[int, Logprob]]):
    """Log-probabilities of tokens: of each the token itself first, then the likeliest. A row is made when it is read,
    since trainers read `tempered_logprobs` alone. `spell` gives the text of a token by itself."""

    def __init__(self, entries: Sequence[TokenLogprobs], spell: Callable[[int], str | None]) -> None:
        self._entries, self._spell = entries, spell

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobRows: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | LogprobRows:
        if isinstance(index, slice):
            return LogprobRows(self._entries[index], self._spell)
        entry, spell = self._entries[index], self._spell
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, spell(entry.token_id), entry.tempered)}
        for rank, (token_id, logprob, tempered) in enumerate(entry.likeliest, start=1):
            found.setdefault(token_id, Logprob(logprob, rank, spell(token_id), tempered))
        return found


class Piece(NamedTuple):
    """Text that a token completed, which is `token_id`. It is None if the text is only a part of a token's, or that of
    several tokens; a token with a name, such as a tag, always has its own piece."""

    token_id: int | None
    text: str


class Delta(msgspec.Struct, frozen=True):
    """What one step added to an answer. Never cumulative: joined deltas are the answer.

    `token_ids` are all new tokens, including the one that ended the answer; `pieces` is the text that can be sent now,
    in pieces. `stop_reason` is the stop string or stop token id that ended it, None for end of text. `index`: which of
    the request's n answers. `version`: of the weights that computed the tokens.

    If requested: `logprobs` of each token, and `tempered_logprobs`, under the sampling distribution; `prompt_logprobs`,
    on one delta of the request, of the prompt's tokens but the first; `routed_experts` and `sampling_mask`, as in
    `wire.Update`, and so `key_versions`, which sessions have.

    Tokens of several steps are in one delta if they were not read in between. `arrived`: time of arrival, by the
    monotonic clock; `arrivals`: of the tokens of each step. `queued_s`, on an answer's first delta: its wait for a
    step.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[dict[int, Logprob]] = ()
    index: int = 0
    version: int = 0
    tempered_logprobs: tuple[float, ...] = ()
    num_cached_tokens: int | None = None
    prompt_logprobs: Sequence[dict[int, Logprob]] | None = None
    routed_experts: RoutedExperts | None = None
    sampling_mask: tuple[bytes, ...] = ()
    key_versions: list[tuple[int, int]] | None = None
    arrived: float = 0.0
    queued_s: float | None = None
    arrivals: tuple[float, ...] | None = None

    @property
    def text(self) -> str:
        return "".join([piece.text for piece in self.pieces])


@dataclass
class CompletionOutput:
    """One answer: its text without the stop string, its token ids including the stop token, and why it ended.

    In addition to vLLM's fields: `tempered_logprobs` of the tokens under the sampling distribution, and
    `weight_versions`, one a token. `routed_experts`: int16 [tokens, MoE layers, A] of prompt and answer without its
    last token, which is never computed; -1 for tokens found in a cache.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    tempered_logprobs: list[float] | None = None
    weight_versions: list[int] = field(default_factory=list)
    routed_experts: NDArray[np.int16] | None = None


@dataclass
class RequestMetrics:
    """Times (`time.monotonic`) at which a request was sent and its tokens arrived."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its answers, in the order of their index. `prompt_logprobs`: the first token has none."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None


def join(deltas: Sequence[Delta], routed: Sequence[RoutedExperts] = (), num_prompt: int = 0) -> CompletionOutput:
    """Join the deltas of one index to an answer. `routed`: recorded experts, including the prompt's."""
    token_ids: list[int] = []
    versions: list[int] = []
    for delta in deltas:
        token_ids += delta.token_ids
        versions += [delta.version] * len(delta.token_ids)
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    last = deltas[-1] if deltas else Delta((), ())
    return CompletionOutput(
        index=last.index,
        text="".join([delta.text for delta in deltas]),
        token_ids=token_ids,
        # Each entry's first token is the sampled one.
        cumulative_logprob=sum(next(iter(entry.values())).logprob for entry in logprobs) if logprobs else None,
        logprobs=logprobs or None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        tempered_logprobs=[value for delta in deltas for value in delta.tempered_logprobs] if logprobs else None,
        weight_versions=versions,
        routed_experts=_experts(routed, num_prompt + len(token_ids) - 1) if routed else None,
    )


def head(run: RoutedExperts, num_tokens: int) -> RoutedExperts:
    """The experts of the first tokens of a range."""
    count = min(num_tokens, run.shape[0])
    row_bytes = len(run.experts) // run.shape[0]
    return RoutedExperts(run.start, (count, *run.shape[1:]), run.experts[: count * row_bytes])


def _experts(routed: Sequence[RoutedExperts], num_tokens: int) -> NDArray[np.int16]:
    """Ranges of tokens as one array of `num_tokens`; later tokens, which a stop string cut off, are ignored."""
    import numpy as np

    out = np.full((num_tokens, *routed[0].shape[1:]), -1, dtype=np.int16)
    for run in routed:
        rows = np.frombuffer(run.experts, dtype="<i2").reshape(run.shape)[: max(0, num_tokens - run.start)]
        out[run.start : run.start + len(rows)] = rows
    return out
