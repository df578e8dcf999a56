"""An answer as a row of segments, one after another: stretches of reasoning, of text, and calls.

APIs whose answers are lists of blocks or items write each segment as one. White space between two calls is no segment.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from glm5.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart

Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True)
class Begun:
    """A segment begins, the `index`th. `call`: which, where it is one."""

    index: int
    kind: Kind
    call: ToolCallStart | None = None


@dataclass(frozen=True)
class Grown:
    """More of the segment that was begun last: text, or arguments."""

    index: int
    kind: Kind
    text: str


@dataclass(frozen=True)
class Ended:
    """A segment is over; `text` is all of it. `is_whole`: the answer did not end within it."""

    index: int
    kind: Kind
    text: str
    call: ToolCallStart | None
    is_whole: bool


Segment = Begun | Grown | Ended


class Segments:
    """Reads one answer."""

    def __init__(self) -> None:
        self._count = 0
        self._open: Begun | None = None
        self._texts: list[str] = []
        self._blank = ""  # white space that is text if text follows it

    def read(self, events: Iterable[Event]) -> Iterator[Segment]:
        """What the next events come to."""
        for event in events:
            match event:
                case ReasoningDelta(text):
                    yield from self._grow("reasoning", text)
                case ContentDelta(text):
                    yield from self._add_text(text)
                case ToolCallStart():
                    yield from self._begin("call", event)
                case ToolCallArguments(_, text):
                    yield from self._grow("call", text)
                case ToolCallEnd():
                    yield from self._end(is_whole=True)

    def finish(self, *, is_whole: bool) -> Iterator[Segment]:
        """The answer ends; `is_whole`: by itself."""
        is_call = self._open is not None and self._open.kind == "call"
        yield from self._end(is_whole=is_whole and not is_call)

    def _add_text(self, text: str) -> Iterator[Segment]:
        if self._open is None or self._open.kind != "text":
            text, self._blank = self._blank + text, ""
            if text.isspace():
                self._blank = text
                return
        yield from self._grow("text", text)

    def _grow(self, kind: Kind, text: str) -> Iterator[Segment]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        self._texts.append(text)
        yield Grown(self._count - 1, kind, text)

    def _begin(self, kind: Kind, call: ToolCallStart | None = None) -> Iterator[Segment]:
        yield from self._end(is_whole=True)
        self._open, self._texts, self._blank = Begun(self._count, kind, call), [], ""
        self._count += 1
        yield self._open

    def _end(self, *, is_whole: bool) -> Iterator[Segment]:
        if (begun := self._open) is not None:
            self._open = None
            yield Ended(begun.index, begun.kind, "".join(self._texts), begun.call, is_whole)
