"""The parts of a parsed answer: stream events, and the complete answer (`collect`).

The complete answer is always the concatenation of the events.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of the reasoning."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool call begins: its index in the answer, a new id, and the complete function name."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments. All deltas of a finished call together are one JSON object."""

    index: int
    delta: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """A tool call is complete. A call without this event was cut off: its arguments are incomplete JSON."""

    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(slots=True)
class ParsedCall:
    """A tool call. `arguments` is the JSON text of an object; it is cut off unless `complete`."""

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(slots=True)
class Parsed:
    """A complete answer. `reasoning` and `content` are None if they are empty."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ParsedCall] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """False if a tool call was cut off."""
        return all(call.complete for call in self.tool_calls)


def collect(events: Iterable[Event]) -> Parsed:
    """The complete answer from its events."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    ended: set[int] = set()
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart():
                starts.append(event)
                arguments.append([])
            case ToolCallArguments(index, delta):
                arguments[index].append(delta)
            case ToolCallEnd(index):
                ended.add(index)
    calls = [
        ParsedCall(start.id, start.name, "".join(parts), start.index in ended)
        for start, parts in zip(starts, arguments, strict=True)
    ]
    return Parsed("".join(reasoning) or None, "".join(content) or None, calls)
