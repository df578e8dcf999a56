"""One prompt on its way to an answer: its tokens, its pages, its text, and when it is over."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from glm5.engine.outputs import Delta, FinishReason, Logprob, Piece
from glm5.engine.params import SamplingParams
from glm5.engine.sampler import Draw
from glm5.engine.text import AnswerText


@dataclass(eq=False)
class Request:
    """State of a request; equal only to itself.

    `token_ids` are prompt and answer; the first `num_computed` of them have their keys in `pages`. `max_new` is the
    most tokens the answer may have, `eos_ids` end it (none with ignore_eos).
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    max_new: int
    eos_ids: frozenset[int]
    text: AnswerText
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def max_len(self) -> int:
        """Tokens at the end at the latest; what the request needs pages for."""
        return len(self.prompt_ids) + self.max_new

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose keys are still to be computed: one while decoding, more while the prompt is new."""
        return len(self.token_ids) - self.num_computed

    def draw(self) -> Draw:
        """How to sample the next token."""
        early = self.num_new < self.params.min_tokens
        forbidden = sorted(self.eos_ids.union(self.params.stop_token_ids)) if early else ()
        return Draw(self.params, self.seed, len(self.token_ids), forbidden)

    def append(self, token_id: int, logprob: dict[int, Logprob] | None) -> Delta:
        """Take a sampled token; sets `finish_reason` when it ends the answer."""
        self.token_ids.append(token_id)
        params, stop_reason = self.params, None
        pieces: list[Piece] = []
        if token_id in self.eos_ids or token_id in params.stop_token_ids:
            self.finish_reason = "stop"
            stop_reason = token_id if token_id in params.stop_token_ids else None
            pieces = self.text.end(token_id if params.include_stop_str_in_output else None)
        else:
            pieces = self.text.feed(token_id, check_stop=self.num_new > params.min_tokens)
            if self.text.stopped_by is not None:
                self.finish_reason, stop_reason = "stop", self.text.stopped_by
            elif self.num_new >= self.max_new:
                self.finish_reason = "length"
                pieces += self.text.end()
        shown = tuple(piece for piece in pieces if piece.text)
        return Delta((token_id,), shown, self.finish_reason, stop_reason, (logprob,) if logprob else ())
