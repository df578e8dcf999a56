"""Text of a streamed answer: tokens through the incremental detokenizer, then through the stop strings."""

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.frontend.outputs import Piece
from glm5.engine.frontend.stop import StopStrings
from glm5.engine.sampling.params import SamplingParams


class AnswerText:
    """Pieces of text, each with the token that completed it; no text without a tokenizer.

    `stopped_by` is the stop string that ended the text, or None.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams):
        self._detokenizer = None if tokenizer is None else tokenizer.stream(skip_special=params.skip_special_tokens)
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

    def end(self, token_id: int | None = None) -> list[Piece]:
        """The remaining pieces, with the text of `token_id`, a stop token to be included in the text, if given."""
        if self._detokenizer is None:
            return []
        last = [] if token_id is None else [Piece(token_id, self._detokenizer.feed(token_id))]
        return [*self._stop.flush(), *last, Piece(None, self._detokenizer.finish())]
