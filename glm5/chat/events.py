"""What a parsed answer consists of, as it arrives (events) and as a whole (`collect`).

The whole is by definition the concatenation of the events: there is no second way to parse.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins: its number in the answer, a new id, and the whole name of the function."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments. All deltas of a finished call together are one JSON object."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is finished. A call without one was cut off: its arguments are a beginning of JSON."""

    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(slots=True)
class ParsedCall:
    """A tool call; `arguments` is the JSON text of an object, only a beginning of it unless `complete`."""

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(slots=True)
class Parsed:
    """A whole answer. `reasoning` and `content` are None where there is none."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ParsedCall] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """False where a call was cut off."""
        return all(call.complete for call in self.tool_calls)


def collect(events: Iterable[Event]) -> Parsed:
    """The whole answer of a stream of events."""
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
