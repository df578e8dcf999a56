"""POST /v1/chat/completions: OpenAI's wire format on one side, token ids on the other. Nothing else."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from glm5.chat.message import normalize_tools
from glm5.common.errors import RequestError
from glm5.serve.answer import Chunk, Head, completion, delta_of, usage_dict
from glm5.serve.errors import ApiError, envelope
from glm5.serve.generation import Job, Reader, Usage, check, steps
from glm5.serve.request import ChatRequest, context_exceeded, read_chat_request
from glm5.serve.service import Service, get_service
from glm5.serve.sse import EventStream

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(
    body: ChatRequest = Depends(read_chat_request), service: Service = Depends(get_service)
) -> Response:
    """Answer a conversation, as a stream of chunks or in one piece."""
    # Templates and tokenizers take a second for a million tokens; the event loop serves everyone.
    head = Head(body.model or service.model_names[0])
    job = await asyncio.to_thread(_prepare, body, service, head)
    check(job, service)
    usage = Usage(len(job.prompt_ids))
    chunks = _chunks(job, service, usage)
    if body.stream:
        events = _events(chunks, head, usage, include_usage=body.stream_options.include_usage)
        return await EventStream.begun(events, failed=_failed)
    async with aclosing(chunks):
        answer = completion(head, [chunk async for chunk in chunks], usage)
    return Response(json.dumps(answer), media_type="application/json")


def _prepare(body: ChatRequest, service: Service, head: Head) -> Job:
    tools = normalize_tools(body.tools) if body.parses_tools else None
    engine, prompt = service.engine, service.template.render(body.messages, tools, **body.template_kwargs())
    if (least := service.tokenizer.least_tokens(prompt)) > engine.max_model_len:
        # A body of 32 MiB takes half a minute to encode, only to be refused then.
        raise context_exceeded(engine.max_model_len, f"at least {least}", param="messages")
    try:
        prompt_ids = service.tokenizer.encode(prompt)
    except RequestError as error:
        raise RequestError(str(error), "messages") from None
    reasoning = service.template.starts_in_reasoning(prompt_ids)
    return Job(
        id=head.id,
        prompt_ids=prompt_ids,
        params=body.sampling(engine.defaults, num_prompt=len(prompt_ids), max_context=engine.max_model_len),
        reader=Reader(service.tokenizer, tools, reasoning=reasoning, parse_tools=body.parses_tools),
    )


async def _chunks(job: Job, service: Service, usage: Usage) -> AsyncGenerator[Chunk, None]:
    """The answer in chunks, of which the first has the role and the last the finish reason."""
    delta: dict[str, Any] = {"role": "assistant"}
    async with aclosing(steps(job, service, usage)) as answer:
        async for step in answer:
            delta |= delta_of(step.events)
            if step.finish_reason is not None:
                yield Chunk(delta, step.finish_reason)
            elif step.events:
                yield Chunk(delta)
                delta = {}


async def _events(
    chunks: AsyncGenerator[Chunk, None], head: Head, usage: Usage, *, include_usage: bool
) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):  # a dropped connection reaches the engine now, not at the next gc
        async for chunk in chunks:
            yield _event(chunk.to_dict(head) | ({"usage": None} if include_usage else {}))
    if include_usage:
        yield _event({**head.to_dict("chat.completion.chunk"), "choices": [], "usage": usage_dict(usage)})
    yield "data: [DONE]\n\n"


def _failed(error: ApiError) -> str:
    return f"{_event(envelope(error))}data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    # Escaped to ASCII: arguments may hold half a surrogate pair, which has no UTF-8 form.
    return f"data: {json.dumps(content)}\n\n"
