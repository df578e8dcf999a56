"""The response of /v1/chat/completions: stream chunks, or the completion that they add up to."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from glm5.serve.chat.body import ChatBody
from glm5.serve.generation.job import LogprobRow, Step, Usage
from glm5.serve.generation.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from glm5.serve.http.sse import SPACE, PlainEvents, Spaced, event


def delta_of(events: Iterable[Event]) -> dict[str, Any]:
    """The `delta` of one step's events, with one entry for each tool call that it extends."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for one in events:
        match one:
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
    """Usage in OpenAI's format."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


@dataclass
class _Choice:
    """One answer so far. `content` and `reasoning` are None until they begin."""

    content: str | None = None
    reasoning: str | None = None
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[LogprobRow] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatAnswer:
    """Converts the steps of one request to chunks, or to one completion, with the fields that its body requests."""

    def __init__(self, body: ChatBody, answer_id: str, model: str, prompt_ids: Sequence[int], formatter: TokenTexts):
        self.body, self.prompt_ids, self.formatter = body, prompt_ids, formatter
        self.head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._begun: set[int] = set()
        self.plain_events: PlainEvents = {}
        asks_more = body.logprobs or body.return_token_ids or body.repeats_usage
        self._has_plain_chunks = not asks_more and body.include_reasoning

    def event(self, step: Step, usage: Usage) -> str:
        """The chunk of a step as an event, or an empty text. In most chunks only one text is new."""
        events = step.events
        if (
            self._has_plain_chunks
            and len(events) == 1
            and isinstance(first := events[0], (ContentDelta, ReasoningDelta))
            and step.finish_reason is None
            and step.prompt_logprobs is None
            and step.index in self._begun
        ):
            spaced = self.plain_events.get((step.index, type(first)))
            if spaced is None:
                sample = self.chunk(Step(step.index, [type(first)(SPACE)], ()), usage)
                spaced = self.plain_events[step.index, type(first)] = Spaced(event(sample or {}))
            return spaced.filled(first.text)
        chunk = self.chunk(step, usage)
        return "" if chunk is None else event(chunk)

    def chunk(self, step: Step, usage: Usage) -> dict[str, Any] | None:
        """The chunk of a step; None for a step without visible output. The first chunk of each choice has the role."""
        body, is_first = self.body, step.index not in self._begun
        delta = self._delta(step)
        has_tokens = bool(step.token_ids) and (body.logprobs or body.return_token_ids)
        if not delta and not has_tokens and step.finish_reason is None and step.prompt_logprobs is None:
            return None
        self._begun.add(step.index)
        choice: dict[str, Any] = {
            "index": step.index,
            "delta": {"role": "assistant", **delta} if is_first else delta,
            "logprobs": self._logprobs(step.logprobs) if step.token_ids else None,
            "finish_reason": step.finish_reason,
        }
        if step.finish_reason is not None:
            choice["stop_reason"] = step.stop_reason
        content = {**self.head, "object": "chat.completion.chunk", "choices": [choice]}
        if body.return_token_ids:
            choice["token_ids"] = list(step.token_ids)
            if is_first:
                # vLLM's clients read them here, SGLang's in the choice.
                content["prompt_token_ids"] = choice["prompt_token_ids"] = list(self.prompt_ids)
        if step.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs(step.prompt_logprobs)
        if body.includes_usage:
            content["usage"] = usage_dict(usage) if body.repeats_usage else None
        return content

    def last_chunk(self, usage: Usage) -> dict[str, Any]:
        """Usage, in a chunk without choices."""
        return {**self.head, "object": "chat.completion.chunk", "choices": [], "usage": usage_dict(usage)}

    def completion(self, steps: Iterable[Step], usage: Usage) -> dict[str, Any]:
        """The completion that all steps add up to."""
        choices = {index: _Choice() for index in range(self.body.n)}
        found: Sequence[LogprobRow] | None = None
        for step in steps:
            _append(choices[step.index], step, self._delta(step))
            found = step.prompt_logprobs if step.prompt_logprobs is not None else found
        content = {
            **self.head,
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in choices.items()],
            "usage": usage_dict(usage),
        }
        if self.body.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs(found or ())
        return content | ({"prompt_token_ids": list(self.prompt_ids)} if self.body.return_token_ids else {})

    def _delta(self, step: Step) -> dict[str, Any]:
        events = step.events
        if not self.body.include_reasoning:
            events = [event for event in events if not isinstance(event, ReasoningDelta)]
        return delta_of(events)

    def _logprobs(self, rows: Sequence[LogprobRow] | None) -> dict[str, Any] | None:
        return None if rows is None else chat_logprobs(rows, self.body.top_logprobs or 0, self.formatter)

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": choice.content,
            "refusal": None,
            "reasoning_content": choice.reasoning,
            "reasoning": choice.reasoning,
            **({"tool_calls": list(choice.calls.values())} if choice.calls else {}),
        }
        content = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self.body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            content |= {"token_ids": choice.token_ids, "prompt_token_ids": list(self.prompt_ids)}
        return content


def _append(choice: _Choice, step: Step, delta: dict[str, Any]) -> None:
    if "content" in delta:
        choice.content = (choice.content or "") + delta["content"]
    if "reasoning" in delta:
        choice.reasoning = (choice.reasoning or "") + delta["reasoning"]
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            function = dict(call["function"])
            choice.calls[call["index"]] = {"id": call["id"], "type": call["type"], "function": function}
        else:
            choice.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    choice.logprobs += step.logprobs or ()
    choice.token_ids += step.token_ids
    choice.finish_reason, choice.stop_reason = step.finish_reason, step.stop_reason
