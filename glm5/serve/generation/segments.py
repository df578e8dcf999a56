"""Splits an answer into consecutive segments: reasoning, text and tool calls.

APIs whose responses are lists of blocks or items write one for each segment. White space between two calls is dropped.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from glm5.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart

Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True)
class SegmentStart:
    """Segment number `index` begins. `call`: the tool call, if it is one."""

    index: int
    kind: Kind
    call: ToolCallStart | None = None


@dataclass(frozen=True)
class SegmentDelta:
    """More text, or arguments, of the current segment."""

    index: int
    kind: Kind
    text: str


@dataclass(frozen=True)
class SegmentEnd:
    """A segment ends; `text` is all of it. `is_complete`: it was not cut off by the end of the answer."""

    index: int
    kind: Kind
    text: str
    call: ToolCallStart | None
    is_complete: bool


Segment = SegmentStart | SegmentDelta | SegmentEnd


class Segments:
    """Splits one answer."""

    def __init__(self) -> None:
        self._count = 0
        self._open: SegmentStart | None = None
        self._texts: list[str] = []
        self._blank = ""  # leading white space, which counts only if text follows it

    def read(self, events: Iterable[Event]) -> Iterator[Segment]:
        """The segments of the next events."""
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
                    yield from self._end(is_complete=True)

    def finish(self, *, is_complete: bool) -> Iterator[Segment]:
        """End the answer. `is_complete`: it was not cut off."""
        is_call = self._open is not None and self._open.kind == "call"
        yield from self._end(is_complete=is_complete and not is_call)

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
        yield SegmentDelta(self._count - 1, kind, text)

    def _begin(self, kind: Kind, call: ToolCallStart | None = None) -> Iterator[Segment]:
        yield from self._end(is_complete=True)
        self._open, self._texts, self._blank = SegmentStart(self._count, kind, call), [], ""
        self._count += 1
        yield self._open

    def _end(self, *, is_complete: bool) -> Iterator[Segment]:
        if (begun := self._open) is not None:
            self._open = None
            yield SegmentEnd(begun.index, begun.kind, "".join(self._texts), begun.call, is_complete)
