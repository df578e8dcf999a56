"""Text of an answer: tokens through the incremental detokenizer, then through the stop strings if there are any."""

from collections.abc import Sequence

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.frontend.outputs import Piece
from glm5.engine.frontend.stop import StopStrings
from glm5.engine.sampling.params import SamplingParams


class AnswerText:
    """Pieces of text, each with the token that completed it; no text without a tokenizer.

    `stopped_by` is the stop string that ended the text, or None.
    """

    __slots__ = ("_added_ids", "_detokenizer", "_stop")

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams):
        self._detokenizer = None if tokenizer is None else tokenizer.stream(skip_special=params.skip_special_tokens)
        self._added_ids = frozenset[int]() if tokenizer is None else tokenizer.added_ids
        self._stop = StopStrings(params.stop, include=params.include_stop_str_in_output)

    @property
    def stopped_by(self) -> str | None:
        return self._stop.matched

    def feed(self, token_id: int, *, check_stop: bool) -> list[Piece]:
        """Pieces released by one more token. With `check_stop` false its text is not searched (min_tokens)."""
        if self._detokenizer is None:
            return []
        piece = Piece(token_id, self._detokenizer.feed(token_id))
        return self._stop.feed(piece) if check_stop else self._stop.pass_through(piece)

    def feed_all(self, token_ids: Sequence[int]) -> list[Piece]:
        """Pieces of several tokens without a search: one for each token with a name, and one for each run of others."""
        stream = self._detokenizer
        if stream is None or not token_ids:
            return []
        if len(token_ids) == 1:
            return [Piece(token_ids[0], stream.feed(token_ids[0]))]
        if self._added_ids.isdisjoint(token_ids):
            return [Piece(None, stream.feed_all(token_ids))]
        pieces: list[Piece] = []
        start = 0
        for at, token_id in enumerate(token_ids):
            if token_id in self._added_ids:
                pieces += self.feed_all(token_ids[start:at])
                pieces.append(Piece(token_id, stream.feed(token_id)))
                start = at + 1
        return pieces + self.feed_all(token_ids[start:])

    def end(self, token_id: int | None = None) -> list[Piece]:
        """The remaining pieces, with the text of `token_id`, a stop token to be included in the text, if given."""
        if self._detokenizer is None:
            return []
        last = [] if token_id is None else [Piece(token_id, self._detokenizer.feed(token_id))]
        return [*self._stop.flush(), *last, Piece(None, self._detokenizer.finish())]
