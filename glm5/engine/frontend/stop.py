"""Stop strings in text that arrives in pieces, token by token.

A piece is released once no stop string can begin in it any more. The match is the one that ends first, and of those
that end together the longest, so the result does not depend on how the text was split into pieces.
"""

from collections import deque
from collections.abc import Sequence

from glm5.engine.frontend.outputs import Piece


class StopStrings:
    """Holds back pieces that may belong to a stop string; `matched` is the string that was found, or None."""

    def __init__(self, stop: Sequence[str], *, include: bool = False):
        self.stop, self.include = tuple(stop), include
        self.matched: str | None = None
        self._held: deque[Piece] = deque()
        self._firsts = frozenset([one[0] for one in self.stop])
        self._longest = max(map(len, self.stop), default=0)

    def feed(self, piece: Piece) -> list[Piece]:
        """Pieces that can be released now. After a match: those up to it, the last one cut; later calls return none."""
        if self.matched is not None:
            return []
        if not self._held and self._firsts.isdisjoint(piece.text):  # no stop string can begin here
            return [piece]
        held = "".join(part.text for part in self._held)
        self._held.append(piece)
        text = held + piece.text
        # The held text contains no complete stop string, so a match ends within the new piece.
        if match := self._first_match(text, len(held)):
            start, end = match
            self.matched = text[start:end]
            return self._release(end if self.include else start, cut=True)
        return self._release(len(text) - self._num_undecided(text), cut=False)

    def pass_through(self, piece: Piece) -> list[Piece]:
        """Release a piece and all held ones without a search (min_tokens not reached, or the token that ends it)."""
        return [*self.flush(), piece]

    def flush(self) -> list[Piece]:
        """Release all held pieces, since no text follows."""
        held = list(self._held)
        self._held.clear()
        return held

    def _first_match(self, text: str, seen: int) -> tuple[int, int] | None:
        found = [
            (start + len(stop), start, start + len(stop))
            for stop in self.stop
            if (start := text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        return min(found)[1:] if found else None

    def _num_undecided(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop):
                return length
        return 0

    def _release(self, length: int, *, cut: bool) -> list[Piece]:
        """Held pieces that lie within the first `length` characters; with `cut`, also the start of the next one."""
        released = []
        while self._held and len(self._held[0].text) <= length:
            piece = self._held.popleft()
            length -= len(piece.text)
            released.append(piece)
        if cut:
            if self._held and length:
                released.append(Piece(None, self._held[0].text[:length]))
            self._held.clear()
        return released
