"""A parser of server-sent events from arbitrary pieces of bytes. It yields the `data:` of each event.

Comments (keep-alives such as `: ping`), event names and ids are skipped. Lines end in LF or CRLF.
"""

from collections.abc import Iterator


class Events:
    """Splits a stream into events. An unfinished event is buffered until its end arrives."""

    def __init__(self) -> None:
        self._buffer = b""
        self._lines: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that `piece` completes."""
        fresh = not self._buffer and not self._lines
        if fresh and piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.count(b"\n") == 2:
            yield piece[6:-2]  # fast path: one complete event, as in nearly every piece
            return
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._lines.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._lines:
                yield b"\n".join(self._lines)
                self._lines.clear()

    def finish(self) -> Iterator[bytes]:
        """The data of a last event without a final empty line."""
        yield from self.feed(b"\n\n")
