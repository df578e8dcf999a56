"""Server-sent events from bytes that come in any pieces: the `data:` of each event, nothing else.

Comments (keep-alives such as `: ping`), event names and ids are passed over. Lines end in LF or CRLF.
"""

from collections.abc import Iterator


class Events:
    """Splits a stream. What has no end yet waits for the next piece."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that `piece` completes."""
        fresh = not self._rest and not self._lines
        if fresh and piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.count(b"\n") == 2:
            yield piece[6:-2]  # one whole event, as nearly every piece is
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._lines.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._lines:
                yield b"\n".join(self._lines)
                self._lines.clear()

    def finish(self) -> Iterator[bytes]:
        """The data of a last event that no empty line follows."""
        yield from self.feed(b"\n\n")
