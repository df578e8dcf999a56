"""POST /v1/chat/completions: OpenAI's wire format on one side, token ids on the other. Nothing else."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response, StreamingResponse

from glm5.chat.events import Event, ToolCallEnd
from glm5.chat.message import normalize_tools
from glm5.chat.parser import OutputParser
from glm5.common.errors import EngineDead, RequestError
from glm5.engine.outputs import Delta
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.answer import Chunk, Head, Usage, completion, delta_of
from glm5.serve.errors import envelope, to_api_error
from glm5.serve.request import ChatRequest, context_exceeded, read_chat_request
from glm5.serve.service import Service, get_service

logger = logging.getLogger(__name__)

router = APIRouter()


@dataclass(frozen=True)
class _Job:
    """A request, ready for the engine; `parser` reads its answer."""

    head: Head
    prompt_ids: Sequence[int]
    params: SamplingParams
    parser: OutputParser
    usage: Usage


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(
    body: ChatRequest = Depends(read_chat_request), service: Service = Depends(get_service)
) -> Response:
    """Answer a conversation, as a stream of chunks or in one piece."""
    # Templates and tokenizers take a second for a million tokens; the event loop serves everyone.
    job = await asyncio.to_thread(_prepare, body, service)
    service.engine.check(job.prompt_ids, job.params)
    chunks = _chunks(job, service)
    if body.stream:
        events = _events(chunks, job, include_usage=body.stream_options.include_usage)
        return StreamingResponse(events, media_type="text/event-stream")
    async with aclosing(chunks):
        answer = completion(job.head, [chunk async for chunk in chunks], job.usage)
    return Response(json.dumps(answer), media_type="application/json")


def _prepare(body: ChatRequest, service: Service) -> _Job:
    tools = normalize_tools(body.tools) if body.parses_tools else None
    engine, prompt = service.engine, service.template.render(body.messages, tools, **body.template_kwargs())
    if (least := service.tokenizer.least_tokens(prompt)) > engine.max_model_len:
        # A body of 32 MiB takes half a minute to encode, only to be refused then.
        raise context_exceeded(engine.max_model_len, f"at least {least}", param="messages")
    try:
        prompt_ids = service.tokenizer.encode(prompt)
    except RequestError as error:
        raise RequestError(str(error), "messages") from None
    return _Job(
        head=Head(body.model or service.model_names[0]),
        prompt_ids=prompt_ids,
        params=body.sampling(engine.defaults, num_prompt=len(prompt_ids), max_context=engine.max_model_len),
        parser=OutputParser(
            service.tokenizer,
            tools,
            reasoning=service.template.starts_in_reasoning(prompt_ids),
            parse_tools=body.parses_tools,
        ),
        usage=Usage(len(prompt_ids)),
    )


async def _chunks(job: _Job, service: Service) -> AsyncGenerator[Chunk, None]:
    """The answer in chunks, of which the first has the role and the last the finish reason."""
    start, finish_reason, called = time.monotonic(), "abort", False
    delta: dict[str, Any] = {"role": "assistant"}
    try:
        async with service.engine.generate(job.prompt_ids, job.params, request_id=job.head.id) as steps:
            async for step in steps:
                job.usage.completion_tokens += len(step.token_ids)
                events = _parse(job.parser, step)
                called = called or any(isinstance(event, ToolCallEnd) for event in events)
                delta |= delta_of(events)
                if step.finish_reason == "abort":
                    raise EngineDead("the server is closing")
                if step.finish_reason is not None:
                    finish_reason = "tool_calls" if called and step.finish_reason == "stop" else step.finish_reason
                    yield Chunk(delta, finish_reason)
                elif events:
                    yield Chunk(delta)
                    delta = {}
    finally:
        seconds, usage = time.monotonic() - start, job.usage
        figures = (job.head.id, usage.prompt_tokens, usage.completion_tokens, seconds, finish_reason)
        logger.info("%s: %d prompt tokens, %d answer tokens, %.2f s, %s", *figures)


def _parse(parser: OutputParser, step: Delta) -> list[Event]:
    events = [event for piece in step.pieces for event in parser.feed(piece.token_id, piece.text)]
    return events + parser.finish() if step.finish_reason is not None else events


async def _events(chunks: AsyncGenerator[Chunk, None], job: _Job, *, include_usage: bool) -> AsyncGenerator[str, None]:
    """Server-sent events. The status line has gone out, so an error becomes the last event."""
    try:
        async with aclosing(chunks):  # a dropped connection reaches the engine now, not at the next gc
            async for chunk in chunks:
                yield _event(chunk.to_dict(job.head) | ({"usage": None} if include_usage else {}))
        if include_usage:
            head = job.head.to_dict("chat.completion.chunk")
            yield _event({**head, "choices": [], "usage": job.usage.to_dict()})
    except Exception as error:
        told = to_api_error(error)
        if told.code == "internal_error":
            logger.exception("%s: a bug", job.head.id)
        else:
            logger.warning("%s: %s", job.head.id, told.message)
        yield _event(envelope(told))
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    # Escaped to ASCII: arguments may hold half a surrogate pair, which has no UTF-8 form.
    return f"data: {json.dumps(content)}\n\n"
