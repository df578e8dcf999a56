"""The response of /v1/messages: Anthropic's stream events, or the message that they add up to.

    message_start
    content_block_start  content_block_delta*  content_block_stop      thinking, text and tool_use, one after another
    message_delta        message_stop                                  stop reason and usage

A thinking block ends with a signature.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from glm5.serve.generation.encrypted_reasoning import encrypt, mark
from glm5.serve.generation.job import Step, Usage
from glm5.serve.generation.segments import Segment, SegmentDelta, SegmentEnd, Segments, SegmentStart

WireEvent = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Usage in Anthropic's format, where input_tokens excludes cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class MessageAnswer:
    """Converts the steps of one request to events. `omits_thinking`: the thinking goes only into the signature."""

    def __init__(self, message_id: str, model: str, *, omits_thinking: bool) -> None:
        self._omits_thinking = omits_thinking
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._is_begun = False
        self._segments = Segments()

    def events(self, step: Step, usage: Usage) -> Iterator[WireEvent]:
        """The events of a step; the first step begins the message, the last one ends it."""
        if not self._is_begun:
            self._is_begun = True
            ending = {"stop_reason": None, "stop_sequence": None, "usage": usage_dict(usage)}
            yield {"type": "message_start", "message": {**self._head, "content": [], **ending}}
        for segment in self._segments.read(step.events):
            yield from self._written(segment)
        if step.finish_reason is not None:
            for segment in self._segments.finish(is_complete=True):
                yield from self._written(segment)
            yield {"type": "message_delta", "delta": _ending(step), "usage": usage_dict(usage)}
            yield {"type": "message_stop"}

    def _written(self, segment: Segment) -> Iterator[WireEvent]:
        match segment:
            case SegmentStart(index):
                yield {"type": "content_block_start", "index": index, "content_block": _empty(segment)}
            case SegmentDelta(index, kind, text):
                if kind != "reasoning" or not self._omits_thinking:
                    name, field = _DELTAS[kind]
                    yield {"type": "content_block_delta", "index": index, "delta": {"type": name, field: text}}
            case SegmentEnd(index, kind, text):
                if kind == "reasoning":
                    signature = encrypt(text) if self._omits_thinking else mark(text)
                    delta = {"type": "signature_delta", "signature": signature}
                    yield {"type": "content_block_delta", "index": index, "delta": delta}
                yield {"type": "content_block_stop", "index": index}


def joined(events: Iterable[WireEvent]) -> dict[str, Any]:
    """The complete message, from all of its events."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event:
            case {"type": "message_start"}:
                message = event["message"]
            case {"type": "content_block_start"}:
                message["content"].append(dict(event["content_block"]))
            case {"type": "content_block_delta", "index": index, "delta": {"type": "input_json_delta"} as delta}:
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                field = delta["type"].removesuffix("_delta")
                message["content"][index][field] += delta[field]
            case {"type": "message_delta"}:
                message |= event["delta"] | {"usage": event["usage"]}
            case _:
                pass
    for index, text in arguments.items():
        message["content"][index]["input"] = _parsed(text)
    return message


def _empty(begun: SegmentStart) -> dict[str, Any]:
    if begun.call is not None:
        block_id = f"toolu_{begun.call.id.removeprefix('call_')}"
        return {"type": "tool_use", "id": block_id, "name": begun.call.name, "input": {}}
    if begun.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _ending(step: Step) -> dict[str, Any]:
    is_stopped = isinstance(step.stop_reason, str)
    reason = step.finish_reason or ""
    return {
        "stop_reason": "stop_sequence" if is_stopped else _STOP_REASONS.get(reason, reason),
        "stop_sequence": step.stop_reason if is_stopped else None,
    }


def _parsed(arguments: str) -> dict[str, Any]:
    """The arguments of a call; {} for a call that was cut off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
