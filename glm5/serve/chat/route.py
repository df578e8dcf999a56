"""POST /v1/chat/completions: converts between OpenAI's format and token ids."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from glm5.common.errors import RequestError
from glm5.serve.chat.answer import ChatAnswer
from glm5.serve.chat.body import ChatBody
from glm5.serve.generation.job import Job, Step, Usage, check, steps
from glm5.serve.generation.prompting import Conversation, Prompt, build_prompt, prepared
from glm5.serve.generation.sampling_fields import fit
from glm5.serve.generation.thinking import template_kwargs
from glm5.serve.http.body import body_of, described
from glm5.serve.http.call import answer_id
from glm5.serve.http.errors import ApiError, envelope, named
from glm5.serve.http.sse import DONE, EventStream, Tap, event
from glm5.serve.service.service import Service

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, openapi_extra=described(ChatBody, streams=True))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, as a stream of chunks or in one response."""
    body, service = await body_of(ChatBody, request)
    job = await prepared(prepare, body, service)
    await check(job, service)
    answer = ChatAnswer(body, job.id, body.model or service.model_names[0], job.prompt_ids, body.formatter(service))
    usage = Usage(len(job.prompt_ids))
    if body.stream:
        tap = Tap[Step](partial(answer.event, usage=usage), answer.plain_events)
        return await EventStream.begun(_events(job, service, answer, usage, tap), failed=failed, tap=tap)
    async with aclosing(steps(job, service, usage)) as found:
        content = answer.completion([step async for step in found], usage)
    return Response(json.dumps(content), media_type="application/json")


def conversation_of(body: Any, service: Service) -> Conversation:
    """The fields of a request that determine its prompt; /tokenize uses it too."""
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other: send one of them",
            "continue_final_message",
        )
    return Conversation(
        messages=body.messages,
        tools=body.tools,
        choice=body.choice(),
        template=template_kwargs(service.template, body.chat_template_kwargs, body.thinking, body.reasoning_effort),
        generates=body.add_generation_prompt is not False,
        continues=body.continue_final_message,
    )


def prepare(body: ChatBody, service: Service) -> Job:
    """The request as the engine gets it. Raises RequestError."""
    body.check_stream_options()
    wanted, wanted_by = body.constraint()
    names = {"structured_outputs": wanted_by, "prompt": "messages", "max_tokens": body.limit}
    names["logprobs"] = "top_logprobs"
    budget, names["thinking_token_budget"] = body.budget
    with named(names):
        prompt = build_prompt(conversation_of(body, service).wanting(wanted), service)
        params = body.params(
            service,
            max_tokens=_max_tokens(body, prompt, service),
            logprobs=body.num_logprobs,
            structured_outputs=prompt.structured,
            thinking_token_budget=budget,
            # By default special tokens stay in the text: the parser needs the tags.
            skip_special_tokens=bool(body.skip_special_tokens),
        )
    options = prompt.options(priority=body.priority, cache_salt=body.cache_salt)
    name = answer_id("chatcmpl-", body.request_id)
    return Job(
        name, prompt.ids, params, options, prompt.reader, names=names, streams=body.stream, recording=prompt.recording
    )


def _max_tokens(body: ChatBody, prompt: Prompt, service: Service) -> int:
    wanted: int | None = getattr(body, body.limit)
    if wanted is not None and wanted < 1:
        raise RequestError(f"{body.limit} is {wanted}; allowed: at least 1", body.limit)
    return fit(service, len(prompt.ids), wanted, prompt="messages", limit=body.limit)


async def _events(
    job: Job, service: Service, answer: ChatAnswer, usage: Usage, tap: Tap[Step]
) -> AsyncGenerator[str, None]:
    async with aclosing(steps(job, service, usage, tap)) as found:  # a lost connection aborts the request at once
        async for step in found:
            if text := answer.event(step, usage):
                yield text
    if answer.body.includes_usage:
        yield event(answer.last_chunk(usage))
    yield DONE


def failed(error: ApiError) -> str:
    """The last events of a stream that fails after its status line was sent."""
    return event(envelope(error)) + DONE
