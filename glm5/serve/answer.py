"""The answer on the wire: chunks of a stream, and the whole message that their concatenation is."""

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from glm5.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from glm5.serve.generation import Usage


def delta_of(events: Iterable[Event]) -> dict[str, Any]:
    """What the events of one step add to a message; one entry for each tool call that grew."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ReasoningDelta(text):
                delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning_content", "") + text
            case ContentDelta(text):
                delta["content"] = delta.get("content", "") + text
            case ToolCallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ToolCallArguments(index, text):
                calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                calls[index]["function"]["arguments"] += text
            case ToolCallEnd():
                pass
    return delta | ({"tool_calls": list(calls.values())} if calls else {})


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI counts it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


@dataclass(frozen=True)
class Head:
    """What all chunks of one answer have in common."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def to_dict(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True)
class Chunk:
    """One step of an answer: what it adds to the message, and on the last one why it ended."""

    delta: dict[str, Any]
    finish_reason: str | None = None

    def to_dict(self, head: Head) -> dict[str, Any]:
        choice = {"index": 0, "delta": self.delta, "logprobs": None, "finish_reason": self.finish_reason}
        return {**head.to_dict("chat.completion.chunk"), "choices": [choice]}


def completion(head: Head, chunks: Iterable[Chunk], usage: Usage) -> dict[str, Any]:
    """The answer in one piece: its message is the concatenation of the chunks."""
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    finish_reason = None
    for chunk in chunks:
        for key in ("content", "reasoning_content"):
            if key in chunk.delta:
                texts[key] = texts.get(key, "") + chunk.delta[key]
        for grown in chunk.delta.get("tool_calls", ()):
            if "id" in grown:
                calls[grown["index"]] = {key: grown[key] for key in ("id", "type")} | {"function": grown["function"]}
            else:
                calls[grown["index"]]["function"]["arguments"] += grown["function"]["arguments"]
        finish_reason = chunk.finish_reason
    reasoning = texts.get("reasoning_content")
    message = {
        "role": "assistant",
        "content": texts.get("content"),
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        **({"tool_calls": list(calls.values())} if calls else {}),
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return {**head.to_dict("chat.completion"), "choices": [choice], "usage": usage_dict(usage)}
