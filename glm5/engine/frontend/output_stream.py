"""Streams one answer: updates with token ids in, deltas with text, finish reasons and log-probabilities out."""

from collections.abc import Callable, Sequence

from glm5.engine.frontend.outputs import Delta, FinishReason, Logprob, Piece
from glm5.engine.frontend.text import AnswerText
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import TokenLogprobs, Update

Spell = Callable[[int], str | None]


class OutputStream:
    """State of one answer. `found_stop`: a stop string in the text ended it, which the engine does not know yet.

    `spell` gives the text of a token by itself, for log-probabilities.
    """

    def __init__(self, index: int, params: SamplingParams, text: AnswerText, spell: Spell):
        self.index, self.found_stop = index, False
        self._params, self._text, self._spell = params, text, spell
        self._num_tokens = 0

    def grow(self, update: Update, arrived: float, now: float) -> Delta:
        """The delta for an update received at `now` for a request that arrived at `arrived`. A finish reason marks the
        last one."""
        token_ids: Sequence[int] = update.token_ids
        assert update.finish_reason != "error", f"{update=}"
        pieces, count = self._pieces(token_ids, update.finish_reason)
        reason: FinishReason | None = update.finish_reason
        stop_reason: int | str | None = None
        if count < len(token_ids) or self._text.stopped_by is not None:
            self.found_stop = reason is None
            reason, stop_reason, token_ids = "stop", self._text.stopped_by, token_ids[:count]
        elif reason == "stop" and token_ids and token_ids[-1] in self._params.stop_token_ids:
            stop_reason = token_ids[-1]
        logprobs: tuple[dict[int, Logprob], ...] = ()
        tempered: tuple[float, ...] = ()
        if update.logprobs is not None:
            entries = update.logprobs[:count]
            logprobs = tuple(self._entry(entry) for entry in entries)
            tempered = tuple(entry.tempered for entry in entries)
        return Delta(
            token_ids=tuple(token_ids),
            pieces=pieces,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=logprobs,
            index=self.index,
            version=update.version,
            tempered_logprobs=tempered,
            num_cached_tokens=update.num_cached,
            prompt_logprobs=None if update.prompt_logprobs is None else tuple(map(self._entry, update.prompt_logprobs)),
            routed_experts=update.routed,
            arrived=now,
            queued_s=None if update.began is None else max(0.0, update.began - arrived),
        )

    def _pieces(self, token_ids: Sequence[int], reason: FinishReason | None) -> tuple[tuple[Piece, ...], int]:
        """Text that can be sent now, and how many of the tokens belong to the answer: those up to a stop string."""
        pieces: list[Piece] = []
        text, params, last = self._text, self._params, len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if i == last and reason == "stop":
                pieces += text.end(token_id if params.include_stop_str_in_output else None)
                break
            pieces += text.feed(token_id, check_stop=self._num_tokens > params.min_tokens)
            if text.stopped_by is not None:
                last = i
                break
        else:
            if reason is not None:
                pieces += text.end()
        return tuple([piece for piece in pieces if piece.text]), last + 1

    def _entry(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token itself first, then the likeliest."""
        spell = self._spell
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, spell(entry.token_id), entry.tempered)}
        for rank, (token_id, logprob, tempered) in enumerate(entry.likeliest, start=1):
            found.setdefault(token_id, Logprob(logprob, rank, spell(token_id), tempered))
        return found
