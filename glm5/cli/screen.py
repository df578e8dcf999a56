"""Prints an answer while it streams: reasoning is dim on a terminal, and between tags elsewhere."""

from collections.abc import Iterable

from glm5.chat.events import ContentDelta, Event, ReasoningDelta, collect
from glm5.common.console import out

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Screen:
    """Writes one answer's events to standard output. `color`: use dim text for reasoning."""

    def __init__(self, *, color: bool):
        self._opening, self._closing = (_DIM, f"{_PLAIN}\n\n") if color else ("<think>", "</think>\n")
        self._thinking = False
        self._events: list[Event] = []

    def show(self, events: Iterable[Event]) -> None:
        """Print these events."""
        for event in events:
            self._events.append(event)
            match event:
                case ReasoningDelta(text):
                    out(text if self._thinking else self._opening + text, end="", flush=True)
                    self._thinking = True
                case ContentDelta(text):
                    self._stop_thinking()
                    out(text, end="", flush=True)
                case _:
                    pass

    def end(self) -> dict[str, str]:
        """Finish the last line. Returns the answer as a message for the conversation's next turn."""
        self._stop_thinking()
        out(flush=True)
        answer = collect(self._events)
        message = {"role": "assistant", "content": answer.content or ""}
        return message | ({"reasoning_content": answer.reasoning} if answer.reasoning else {})

    def _stop_thinking(self) -> None:
        if self._thinking:
            out(self._closing, end="", flush=True)
        self._thinking = False
