"""The response of /v1/responses: OpenAI's stream events; the last one contains the complete response.

    response.created  response.in_progress
    response.output_item.added   then, for an item of reasoning or a message
        response.content_part.added  response.{reasoning_text,output_text}.{delta* done}  response.content_part.done
    or, for a function call
        response.function_call_arguments.{delta* done}
    response.output_item.done
    response.completed, or response.incomplete, or response.failed

Items follow one another; every event has a sequence number.
"""

import time
from collections.abc import Iterator
from typing import Any

from glm5.chat.parser import CALL, CALL_END, THINK_END
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.generation.encrypted_reasoning import encrypt
from glm5.serve.generation.job import LogprobRow, Reader, Step, Usage
from glm5.serve.generation.logprobs import TokenTexts, chat_logprobs
from glm5.serve.generation.segments import Kind, Segment, SegmentDelta, SegmentEnd, Segments, SegmentStart
from glm5.serve.http.errors import ApiError
from glm5.serve.responses.body import ResponsesBody
from glm5.serve.responses.items import new_id
from glm5.serve.responses.tools import OfferedTools

WireEvent = dict[str, Any]

_NAMES: dict[Kind, tuple[str, str]] = {
    "reasoning": ("reasoning", "reasoning_text"),
    "text": ("message", "output_text"),
    "call": ("function_call", "function_call_arguments"),
}
_ENDS = {"length": "incomplete", "abort": "cancelled"}


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Usage in the format of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class TextRows:
    """Selects the log-probabilities of text tokens: not those of reasoning, tool calls and stop tokens."""

    def __init__(self, reader: Reader):
        tokenizer = reader.tokenizer
        self._think_end, self._call, self._call_end = map(tokenizer.id_of, (THINK_END, CALL, CALL_END))
        self._ends = tokenizer.eos_ids
        self._reads_calls, self._is_text = reader.parse_tools, not reader.reasoning

    def of(self, step: Step) -> list[LogprobRow]:
        rows: list[LogprobRow] = []
        for token_id, row in zip(step.token_ids, step.logprobs or (), strict=False):
            if token_id == self._think_end or (token_id == self._call_end and self._reads_calls):
                self._is_text = True
            elif token_id == self._call and self._reads_calls:
                self._is_text = False
            elif self._is_text and token_id not in self._ends:
                rows.append(row)
        return rows


class ResponseAnswer:
    """Converts the steps of one request to events, and builds the response."""

    def __init__(self, response_id: str, model: str, body: ResponsesBody, params: SamplingParams, reader: Reader):
        self.body = body
        self.response = _response(response_id, model, body, params)
        self._items: list[dict[str, Any]] = self.response["output"]
        self._segments, self._rows = Segments(), TextRows(reader)
        self._formatter = TokenTexts(reader.tokenizer)
        self._new_rows: list[LogprobRow] = []
        self._text_logprobs: list[dict[str, Any]] = []
        self._number = 0
        self._is_begun = False

    def events(self, step: Step, usage: Usage) -> Iterator[WireEvent]:
        """The events of a step; the first step begins the response, the last one ends it."""
        yield from self._begin()
        if self.body.num_logprobs is not None:
            self._new_rows += self._rows.of(step)
        for segment in self._segments.read(step.events):
            yield from self._written(segment)
        if step.finish_reason is not None:
            yield from self._end(step.finish_reason, usage)

    def failure(self, error: ApiError) -> Iterator[WireEvent]:
        """The events that end the response with an error."""
        yield from self._begin()
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("response.failed", response=self._snapshot())

    def _begin(self) -> Iterator[WireEvent]:
        if not self._is_begun:
            self._is_begun = True
            yield self._event("response.created", response=self._snapshot())
            yield self._event("response.in_progress", response=self._snapshot())

    def _end(self, reason: str, usage: Usage) -> Iterator[WireEvent]:
        for segment in self._segments.finish(is_complete=reason not in _ENDS):
            yield from self._written(segment)
        status = _ENDS.get(reason, "completed")
        self.response |= {"status": status, "usage": usage_dict(usage), "completed_at": int(time.time())}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        kind = "response.completed" if status == "completed" else "response.incomplete"
        yield self._event(kind, response=self._snapshot())

    def _written(self, segment: Segment) -> Iterator[WireEvent]:
        kind, name = _NAMES[segment.kind]
        match segment:
            case SegmentStart():
                item = _new_item(kind, segment, self.body.offered)
                self._items.append(item)
                # A copy: the item is extended before the event is serialized.
                begun = item | {"content": []} if "content" in item else dict(item)
                yield self._event("response.output_item.added", output_index=segment.index, item=begun)
                if "content" in item:
                    part = dict(item["content"][0])
                    yield self._at(segment, "response.content_part.added", content_index=0, part=part)
            case SegmentDelta(text=text):
                more: dict[str, Any] = {} if segment.kind == "call" else {"content_index": 0}
                if segment.kind == "text":
                    more["logprobs"] = self._take_logprobs()
                yield self._at(segment, f"response.{name}.delta", delta=text, **more)
            case SegmentEnd():
                yield from self._ended(segment, name)

    def _ended(self, ended: SegmentEnd, name: str) -> Iterator[WireEvent]:
        item = self._items[ended.index]
        item["status"] = "completed" if ended.is_complete else "incomplete"
        if ended.kind == "call":
            item["arguments"] = ended.text
            yield self._at(ended, f"response.{name}.done", name=item["name"], arguments=ended.text)
        else:
            part = item["content"][0]
            part["text"] = ended.text
            more: dict[str, Any] = {}
            if ended.kind == "text":
                self._take_logprobs()
                part["logprobs"], self._text_logprobs = self._text_logprobs, []
                more["logprobs"] = part["logprobs"]
            elif self.body.encrypts_reasoning:
                item["encrypted_content"] = encrypt(ended.text)
            yield self._at(ended, f"response.{name}.done", content_index=0, text=ended.text, **more)
            yield self._at(ended, "response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=ended.index, item=item)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """The log-probabilities of new tokens. These may cover more or less than the text that they are sent with."""
        rows, self._new_rows = self._new_rows, []
        found = chat_logprobs(rows, self.body.top_logprobs or 0, self._formatter)["content"]
        self._text_logprobs += found
        return found

    def _at(self, segment: Segment, kind: str, **fields: Any) -> WireEvent:
        """An event of an item."""
        return self._event(kind, item_id=self._items[segment.index]["id"], output_index=segment.index, **fields)

    def _event(self, kind: str, **fields: Any) -> WireEvent:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": list(self._items)}


def _new_item(kind: str, begun: SegmentStart, tools: OfferedTools) -> dict[str, Any]:
    item: dict[str, Any] = {"id": new_id(kind), "type": kind, "status": "in_progress"}
    if begun.call is not None:
        return item | {"call_id": begun.call.id, **tools.named(begun.call.name), "arguments": ""}
    if begun.kind == "reasoning":
        return item | {"summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return item | {"role": "assistant", "content": [part]}


def _response(response_id: str, model: str, body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    """The initial response, with the parameters of its request."""
    reasoning = body.reasoning
    form = None if body.text is None else body.text.format
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": body.store,
        "temperature": params.temperature,
        "text": {"format": form or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.offered.given,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
