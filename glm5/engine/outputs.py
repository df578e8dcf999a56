"""What generation gives back. Names are vLLM's: `RequestOutput` for a whole answer, `Delta` for a step of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """Natural log probability of a token before temperature, and its rank among all tokens (1 = likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class Piece(NamedTuple):
    """Text that a token made visible. `token_id` is None where the text is only a part of a token's."""

    token_id: int | None
    text: str


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer. Never cumulative: joined deltas are the answer.

    `token_ids` are all new tokens, the one that ended the answer included; `pieces` is the text that became
    certain, by token. `stop_reason` is the stop string or stop token id that ended it, None for end of text.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[dict[int, Logprob], ...] = ()

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass
class CompletionOutput:
    """One answer: text without what stopped it, its token ids with, and why it ended."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A prompt and its answers (always one, until `n` is more)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False


def join(deltas: list[Delta]) -> CompletionOutput:
    """The answer that these deltas spell."""
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    last = deltas[-1] if deltas else Delta((), ())
    return CompletionOutput(
        index=0,
        text="".join(delta.text for delta in deltas),
        token_ids=token_ids,
        # Each entry's first token is the sampled one.
        cumulative_logprob=sum(next(iter(entry.values())).logprob for entry in logprobs) if logprobs else None,
        logprobs=logprobs or None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
