"""The answer to a message on the wire: Anthropic's events, or the message that their concatenation is.

    message_start
    content_block_start  content_block_delta*  content_block_stop      thinking, text and tool_use, one after another
    message_delta        message_stop                                  why it ended, and usage

A block of thinking ends with a signature.
"""

import json
from collections.abc import Iterator
from typing import Any

from glm5.chat.events import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from glm5.serve.generation import Step, Usage
from glm5.serve.sealed import mark, seal

WireEvent = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Usage as Anthropic counts it: what was cached is no input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class MessageAnswer:
    """Writes the steps of one request. `omits_thinking`: it is sealed in the signature, and not shown."""

    def __init__(self, message_id: str, model: str, *, omits_thinking: bool) -> None:
        self._omits_thinking = omits_thinking
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._is_begun = False
        self._num_blocks = 0
        self._open: str | None = None  # the type of the block that grows: the last one
        self._thought: list[str] = []
        self._blank = ""  # white space that becomes text when text follows it

    def events(self, step: Step, usage: Usage) -> Iterator[WireEvent]:
        """What a step adds; the first one begins the message, the last one ends it."""
        if not self._is_begun:
            self._is_begun = True
            ending = {"stop_reason": None, "stop_sequence": None, "usage": usage_dict(usage)}
            yield {"type": "message_start", "message": {**self._head, "content": [], **ending}}
        for event in step.events:
            match event:
                case ReasoningDelta(text):
                    yield from self._grow_thinking(text)
                case ContentDelta(text):
                    yield from self._grow_text(text)
                case ToolCallStart(_, call_id, name):
                    block_id = f"toolu_{call_id.removeprefix('call_')}"
                    yield from self._begin({"type": "tool_use", "id": block_id, "name": name, "input": {}})
                case ToolCallArguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case ToolCallEnd():
                    yield from self._end_block()
        if step.finish_reason is not None:
            yield from self._finish(step, usage)

    def joined(self, events: Iterator[WireEvent]) -> dict[str, Any]:
        """The message that these events of all its steps spell."""
        message: dict[str, Any] = {}
        arguments: dict[int, str] = {}
        for event in events:
            match event:
                case {"type": "message_start"}:
                    message = event["message"]
                case {"type": "content_block_start"}:
                    message["content"].append(dict(event["content_block"]))
                case {"type": "content_block_delta", "index": index, "delta": delta}:
                    if delta["type"] == "input_json_delta":
                        arguments[index] = arguments.get(index, "") + delta["partial_json"]
                    else:
                        name = delta["type"].removesuffix("_delta")
                        message["content"][index][name] += delta[name]
                case {"type": "message_delta"}:
                    message |= event["delta"] | {"usage": event["usage"]}
                case _:
                    pass
        for index, text in arguments.items():
            message["content"][index]["input"] = _parsed(text)
        return message

    def _grow_thinking(self, text: str) -> Iterator[WireEvent]:
        if self._open != "thinking":
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
        self._thought.append(text)
        if not self._omits_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _grow_text(self, text: str) -> Iterator[WireEvent]:
        if self._open != "text":
            text, self._blank = self._blank + text, ""
            if text.isspace():
                self._blank = text
                return
            yield from self._begin({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _begin(self, block: dict[str, Any]) -> Iterator[WireEvent]:
        yield from self._end_block()
        self._open, self._blank = block["type"], ""
        self._num_blocks += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _end_block(self) -> Iterator[WireEvent]:
        if self._open is None:
            return
        if self._open == "thinking":
            thought, self._thought = "".join(self._thought), []
            signature = seal(thought) if self._omits_thinking else mark(thought)
            yield self._delta({"type": "signature_delta", "signature": signature})
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _finish(self, step: Step, usage: Usage) -> Iterator[WireEvent]:
        yield from self._end_block()
        is_stopped = isinstance(step.stop_reason, str)
        reason = step.finish_reason or ""
        delta = {
            "stop_reason": "stop_sequence" if is_stopped else _STOP_REASONS.get(reason, reason),
            "stop_sequence": step.stop_reason if is_stopped else None,
        }
        yield {"type": "message_delta", "delta": delta, "usage": usage_dict(usage)}
        yield {"type": "message_stop"}

    @property
    def _index(self) -> int:
        return self._num_blocks - 1

    def _delta(self, delta: dict[str, Any]) -> WireEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _parsed(arguments: str) -> dict[str, Any]:
    """Arguments of a call; those of one that was cut off are none."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
