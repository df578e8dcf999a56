"""Streams one answer: token ids in, deltas with text, finish reasons and log-probabilities out.

The thread that pumps only lists what arrives. Deltas and their text are made where they are taken, of everything that
has arrived until then. Stop strings alone are searched for at once, because they end an answer.

One thread adds to the lists and another takes from them. Single operations of lists are atomic, and each thread does
them in the order that loses nothing.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from msgspec.structs import replace

from glm5.engine.frontend.outputs import Delta, FinishReason, LogprobRows, Piece
from glm5.engine.frontend.text import AnswerText
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import RoutedExperts, TokenLogprobs, Update

Spell = Callable[[int], str | None]
NEVER = sys.maxsize
_Searched = tuple[int | Update, list[Piece]]
# A token, by itself or with its log-probabilities, or an update that says more; with its text if that was searched.
_News = int | TokenLogprobs | Update | _Searched


@dataclass
class _Gain:
    """What updates under one version of the weights add to an answer."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int | None = None
    began: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sampling_mask: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    routed: RoutedExperts | None = None
    key_versions: list[tuple[int, int]] | None = None

    def add(self, update: Update) -> None:
        assert update.finish_reason != "error", f"{update=}"
        self.token_ids += update.token_ids
        self.finish_reason = update.finish_reason
        self.logprobs += update.logprobs or ()
        self.sampling_mask += update.sampling_mask or ()
        self.num_cached = update.num_cached if self.num_cached is None else self.num_cached
        self.began = update.began if self.began is None else self.began
        self.prompt_logprobs = update.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs
        self.key_versions = update.key_versions if self.key_versions is None else self.key_versions
        if update.routed is not None:
            self.routed = update.routed if self.routed is None else self.routed.then(update.routed)


class OutputStream:
    """State of one answer. `take` gives what has arrived; whoever takes is told when `news` has `threshold` items.

    `sent`: when the request was sent. `interval`: the threshold after the first delta; it bounds the deltas of an
    answer, which then have at least so many tokens each. With `output_kind` FINAL_ONLY nobody is told before the end.
    `spell` gives the text of a token by itself, for
    log-probabilities. `found_stop`: a stop string in the text ended the answer, which the engine does not know yet.
    """

    def __init__(
        self, index: int, params: SamplingParams, text: AnswerText, spell: Spell, *, sent: float, interval: int = 1
    ):
        self.index, self.is_searched, self.found_stop = index, bool(params.stop), False
        self.threshold, self._interval = (NEVER, NEVER) if params.output_kind == "FINAL_ONLY" else (1, interval)
        self.version, self.arrived = 0, sent  # of the last update
        self.arrivals: list[float] = []  # when tokens of a step arrived, for each step
        self.news: list[_News] = []
        self._params, self._text, self._spell, self._sent = params, text, spell, sent
        self.has_begun, self._has_ended = False, False  # some or all of it was taken
        self._num_searched, self._read_version = 0, 0

    def add(self, update: Update, now: float) -> None:
        """An update that arrived at the time `now`. A finish reason marks the last one."""
        self.version = update.version
        if update.token_ids:
            self.arrived = now
            self.arrivals.append(now)
        self.news.append(self._searched(update) if self.is_searched else update)

    def add_token(self, token_id: int, version: int, now: float, entry: TokenLogprobs | None = None) -> None:
        """`add` for an update with this token and no more than its log-probabilities, made short: it is called for
        every token."""
        if version != self.version or (entry is not None and self.is_searched):
            self.add(Update(0, [token_id], version, logprobs=None if entry is None else [entry]), now)
            return
        self.arrived = now
        self.arrivals.append(now)
        if not self.is_searched:
            self.news.append(token_id if entry is None else entry)
            return
        self._num_searched += 1
        pieces = self._text.feed(token_id, check_stop=self._num_searched > self._params.min_tokens)
        if self._text.stopped_by is None:
            self.news.append((token_id, pieces))
        else:
            self.found_stop = True
            self.news.append((Update(0, [token_id], version, "stop"), pieces))

    def abort(self) -> None:
        """End the answer here: nothing arrives any more. From any thread."""
        self.news.append(Update(0, [], self.version, "abort"))

    def take(self) -> list[Delta]:
        """What has arrived since the last call: a delta for each version of the weights and of keys."""
        self.threshold = self._interval  # first: what arrives from now on is told of again
        news = self.news[:]
        if not news or self._has_ended:
            return []
        self.has_begun = True
        del self.news[: len(news)]
        arrivals = tuple(self.arrivals)
        del self.arrivals[: len(arrivals)]
        if type(news[0]) is int and (len(news) == 1 or set(map(type, news)) == {int}):
            return [self._plain(cast("list[int]", news), arrivals)]
        deltas = self._read(news, arrivals)
        self._has_ended = deltas[-1].finish_reason is not None
        return deltas

    def _plain(self, token_ids: list[int], arrivals: tuple[float, ...]) -> Delta:
        """A delta of tokens alone, without a search: as from `_delta`, which takes longer. Most are like this."""
        pieces = self._text.feed_all(token_ids)
        shown = tuple(pieces) if len(pieces) == 1 and pieces[0].text else _with_text(pieces)
        return Delta(
            tuple(token_ids),
            shown,
            index=self.index,
            version=self._read_version,
            arrived=self.arrived,
            arrivals=arrivals,
        )

    def _searched(self, update: Update) -> _Searched:
        """An update up to a stop string in its text, with that text."""
        text, token_ids = self._text, update.token_ids
        ends_text = _ends_text(token_ids, update.finish_reason)
        pieces: list[Piece] = []
        for count, token_id in enumerate(token_ids[:-1] if ends_text else token_ids, 1):
            self._num_searched += 1
            pieces += text.feed(token_id, check_stop=self._num_searched > self._params.min_tokens)
            if text.stopped_by is not None:
                self.found_stop = update.finish_reason is None
                logprobs, masks = (each and each[:count] for each in (update.logprobs, update.sampling_mask))
                head = {"token_ids": token_ids[:count], "logprobs": logprobs, "sampling_mask": masks}
                return replace(update, finish_reason="stop", **head), pieces
        if update.finish_reason is not None:
            pieces += self._last_pieces(token_ids if ends_text else ())
        return update, pieces

    def _read(self, news: Sequence[_News], arrivals: tuple[float, ...]) -> list[Delta]:
        """Deltas of tokens and updates. The first one has all `arrivals`."""
        deltas: list[Delta] = []
        gain = _Gain()
        for item in news:
            if type(item) is int:
                gain.token_ids.append(item)
                continue
            if isinstance(item, TokenLogprobs):
                gain.token_ids.append(item.token_id)
                gain.logprobs.append(item)
                continue
            update, pieces = item if isinstance(item, tuple) else (item, ())
            if isinstance(update, int):
                gain.token_ids.append(update)
            else:
                is_other = update.version != self._read_version or update.key_versions is not None
                if is_other and gain.token_ids:
                    deltas.append(self._delta(gain, arrivals))
                    gain, arrivals = _Gain(), ()
                self._read_version = update.version
                gain.add(update)
            gain.pieces += pieces
            if gain.finish_reason is not None:  # `abort` may have come later
                break
        return [*deltas, self._delta(gain, arrivals)]

    def _delta(self, gain: _Gain, arrivals: tuple[float, ...]) -> Delta:
        token_ids, reason = gain.token_ids, gain.finish_reason
        stopped_by: int | str | None = self._text.stopped_by if reason == "stop" else None
        if stopped_by is None and _ends_text(token_ids, reason) and token_ids[-1] in self._params.stop_token_ids:
            stopped_by = token_ids[-1]
        pieces = gain.pieces if self.is_searched else self._pieces(token_ids, reason)
        entries, prompt = gain.logprobs, gain.prompt_logprobs
        return Delta(
            token_ids=tuple(token_ids),
            pieces=_with_text(pieces),
            finish_reason=reason,
            stop_reason=stopped_by,
            logprobs=LogprobRows(entries, self._spell) if entries else (),
            index=self.index,
            version=self._read_version,
            tempered_logprobs=tuple([entry.tempered for entry in entries]) if entries else (),
            num_cached_tokens=gain.num_cached,
            prompt_logprobs=None if prompt is None else LogprobRows(prompt, self._spell),
            routed_experts=gain.routed,
            sampling_mask=tuple(gain.sampling_mask),
            key_versions=gain.key_versions,
            arrived=self.arrived,
            queued_s=None if gain.began is None else max(0.0, gain.began - self._sent),
            arrivals=arrivals,
        )

    def _pieces(self, token_ids: Sequence[int], reason: FinishReason | None) -> list[Piece]:
        if reason is None:
            return self._text.feed_all(token_ids)
        ends_text = _ends_text(token_ids, reason)
        pieces = self._text.feed_all(token_ids[:-1] if ends_text else token_ids)
        return pieces + self._last_pieces(token_ids if ends_text else ())

    def _last_pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        """The end of the text. The last of the tokens, if there are any, is not in it unless that was asked for."""
        is_shown = bool(token_ids) and self._params.include_stop_str_in_output
        return self._text.end(token_ids[-1] if is_shown else None)


def _with_text(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    return tuple([piece for piece in pieces if piece.text])


def _ends_text(token_ids: Sequence[int], reason: FinishReason | Literal["error"] | None) -> bool:
    """Whether the last token ended the answer, and is no text."""
    return reason == "stop" and len(token_ids) > 0
