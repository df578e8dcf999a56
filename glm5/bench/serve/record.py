"""The measurements of one request, in seconds of the client's clock.

    TTFT  first token - sent            sent: just before the request is written, connecting included
    E2E   end - sent                    end: the last chunk with a choice; the usage chunk after it does not count
    TPOT  (E2E - TTFT) / (n - 1)        n: tokens of the answer by the server's final usage; none for n = 1
    ITL   one value a token after the first chunk: the time since the chunk before, divided by the chunk's tokens

Tokens of a chunk are those that the server reports for it (`counted` is "chunk"). If the server reports only the total,
and it differs from the number of chunks, the total is distributed evenly over the chunks ("usage"): means are exact,
percentiles smoothed. Without any usage each chunk counts as one token ("guess").

An answer without text but with a finish reason is valid: all its tokens, by usage, arrive at its end.
"""

from array import array
from dataclasses import dataclass, field
from typing import Literal

from glm5.bench.serve.api_formats import Piece, Usage
from glm5.bench.serve.failure import CUT_OFF, NO_TOKENS, RequestFailed

UNKNOWN = -1
Counted = Literal["chunk", "usage", "guess"]


@dataclass(slots=True)
class Record:
    """One request. `due`: its intended time of sending. `first_wave`: whether it was sent when all clients started."""

    conversation: int = 0
    turn: int = 0
    first_wave: bool = False
    due: float = 0.0
    sent: float = 0.0
    end: float = 0.0
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    counted: Counted = "guess"
    usage: Usage = field(default_factory=Usage)
    finish: str | None = None
    error: str | None = None
    message: str = ""
    _totals: "array[int]" = field(default_factory=lambda: array("q"))
    _ends_empty: bool = False

    def add(self, piece: Piece, now: float) -> None:
        """Add a chunk that arrived at `now`."""
        if piece.usage is not None:
            self.usage = piece.usage
        if not piece.carries and piece.finish is None:
            return
        self.end, self.finish = now, piece.finish or self.finish
        so_far = self._totals[-1] if self._totals else 0
        total = piece.total
        if total is None and piece.added is not None:
            total = so_far + piece.added
        if so_far == UNKNOWN or total is None:
            total = UNKNOWN
        if not piece.carries and total <= so_far:  # only a finish reason
            self._ends_empty = total == UNKNOWN
            return
        self.arrivals.append(now)
        self._totals.append(total if total == UNKNOWN else max(total, so_far))  # two chunks may share a token

    def finalize(self) -> None:
        """Count the tokens of chunks after the stream has ended. Raises `RequestFailed` if the answer is incomplete."""
        if not self.arrivals and not self.end:
            raise RequestFailed(NO_TOKENS, "the stream has nothing of an answer")
        if self.finish is None:
            raise RequestFailed(CUT_OFF, f"the stream ended after {len(self.arrivals)} chunks without a finish reason")
        total = self.usage.completion_tokens
        if not self.arrivals:  # no text: the model ended at once, or its tokens are hidden
            self.arrivals.append(self.end)
            self.counted = "guess" if total is None else "chunk"
            self.tokens = array("q", [1 if total is None else total])
            return
        num_chunks = len(self.arrivals)
        if self._ends_empty and total == num_chunks + 1:  # the end token came with the finish reason
            self.arrivals.append(self.end)
            self._totals.append(UNKNOWN)
            num_chunks += 1
        if min(self._totals) > UNKNOWN:
            self.counted = "chunk"
            self.tokens = array("q", (b - a for a, b in zip([0, *self._totals], self._totals, strict=False)))
        elif total:
            self.counted = "chunk" if total == num_chunks else "usage"
            self.tokens = distribute(total, num_chunks)
        else:
            self.tokens = array("q", [1] * num_chunks)
        self._totals = array("q")

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return self.usage.completion_tokens or sum(self.tokens)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        n = self.num_tokens
        return (self.latency - self.ttft) / (n - 1) if n > 1 else None

    def itl(self) -> list[float]:
        """The time of each token after the first chunk. The time of a chunk without tokens is added to the next one."""
        values: list[float] = []
        waited = 0.0
        for k in range(1, len(self.arrivals)):
            waited += self.arrivals[k] - self.arrivals[k - 1]
            if n := self.tokens[k]:
                values += [waited / n] * n
                waited = 0.0
        return values

    def gaps(self) -> list[float]:
        """The times between chunks, whatever their content. This is vLLM's ITL."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def distribute(total: int, num_chunks: int) -> "array[int]":
    """`total` tokens distributed over chunks as evenly as possible; the first chunk has at least one."""
    if num_chunks == 1:
        return array("q", [total])
    first = max(1, round(total / num_chunks))
    rest, others = max(total - first, 0), num_chunks - 1
    return array("q", [first, *((k + 1) * rest // others - k * rest // others for k in range(others))])
