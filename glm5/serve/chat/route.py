"""POST /v1/chat/completions: OpenAI's wire format on one side, token ids on the other. Nothing else."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from glm5.common.errors import RequestError
from glm5.serve.chat.answer import ChatAnswer
from glm5.serve.chat.body import ChatBody
from glm5.serve.generation.job import Job, Usage, check, steps
from glm5.serve.generation.logprobs import Speller
from glm5.serve.generation.prompting import Conversation, Prompt, prompted
from glm5.serve.generation.sampling_fields import fit
from glm5.serve.generation.thinking import template_kwargs
from glm5.serve.http.body import body_of, described
from glm5.serve.http.call import answer_id
from glm5.serve.http.errors import ApiError, envelope, named
from glm5.serve.http.sse import DONE, EventStream, event
from glm5.serve.service.service import Service, get_service

router = APIRouter()
_read = body_of(ChatBody)


@router.post("/v1/chat/completions", response_model=None, openapi_extra=described(ChatBody, streams=True))
async def chat_completions(body: ChatBody = Depends(_read), service: Service = Depends(get_service)) -> Response:
    """Answer a conversation, as a stream of chunks or in one piece."""
    # Templates and tokenizers take a second for a million tokens; the event loop serves everyone.
    job = await asyncio.to_thread(_prepare, body, service)
    check(job, service)
    speller = Speller(service.tokenizer, as_ids=body.return_tokens_as_token_ids)
    answer = ChatAnswer(body, job.id, body.model or service.model_names[0], job.prompt_ids, speller)
    usage = Usage(len(job.prompt_ids))
    if body.stream:
        return await EventStream.begun(_events(job, service, answer, usage), failed=failed)
    async with aclosing(steps(job, service, usage)) as found:
        content = answer.whole([step async for step in found], usage)
    return Response(json.dumps(content), media_type="application/json")


def conversation_of(body: Any, service: Service) -> Conversation:
    """The part of a request that its prompt is made of; /tokenize shares it."""
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other: a turn begins or goes on",
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


def _prepare(body: ChatBody, service: Service) -> Job:
    body.check_stream_options()
    wanted, wanted_by = body.constraint()
    names = {"structured_outputs": wanted_by, "prompt": "messages", "max_tokens": body.limit}
    names["logprobs"] = "top_logprobs"
    budget, names["thinking_token_budget"] = body.budget
    with named(names):
        prompt = prompted(conversation_of(body, service).wanting(wanted), service)
        params = body.params(
            service,
            max_tokens=_max_tokens(body, prompt, service),
            logprobs=body.num_logprobs,
            structured_outputs=prompt.structured,
            thinking_token_budget=budget,
            # Text that a model writes is shown as it is, unless asked otherwise: here tags and roles matter.
            skip_special_tokens=bool(body.skip_special_tokens),
        )
    options = prompt.options(priority=body.priority, cache_salt=body.cache_salt)
    return Job(answer_id("chatcmpl-", body.request_id), prompt.ids, params, options, prompt.reader, names=names)


def _max_tokens(body: ChatBody, prompt: Prompt, service: Service) -> int:
    wanted: int | None = getattr(body, body.limit)
    if wanted is not None and wanted < 1:
        raise RequestError(f"{body.limit} is {wanted}; allowed: at least 1", body.limit)
    return fit(service, len(prompt.ids), wanted, prompt="messages", limit=body.limit)


async def _events(job: Job, service: Service, answer: ChatAnswer, usage: Usage) -> AsyncGenerator[str, None]:
    async with aclosing(steps(job, service, usage)) as found:  # a dropped connection reaches the engine now
        async for step in found:
            if (chunk := answer.chunk(step, usage)) is not None:
                yield event(chunk)
    if answer.body.includes_usage:
        yield event(answer.last_chunk(usage))
    yield DONE


def failed(error: ApiError) -> str:
    """The end of a stream that an error ends: the status line has gone out."""
    return event(envelope(error)) + DONE
