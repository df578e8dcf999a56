"""POST /v1/messages and /v1/messages/count_tokens: converts between Anthropic's format and token ids."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from glm5.chat.message import Message
from glm5.common.errors import RequestError
from glm5.engine.sampling.params import StructuredOutputsParams
from glm5.serve.anthropic.answer import MessageAnswer, joined
from glm5.serve.anthropic.body import CountBody, MessagesBody, PromptFields
from glm5.serve.anthropic.messages import messages_of, tools_of
from glm5.serve.generation.job import Job, Step, Usage, check, steps
from glm5.serve.generation.prompting import Conversation, Prompt, build_prompt, prepared
from glm5.serve.generation.thinking import Thinking, template_kwargs
from glm5.serve.http.body import body_of, described
from glm5.serve.http.errors import ApiError, anthropic_envelope, named
from glm5.serve.http.sse import EventStream, Tap, event
from glm5.serve.service.service import Service

router = APIRouter()

PING = event({"type": "ping"}, "ping")


@router.post("/v1/messages", response_model=None, openapi_extra=described(MessagesBody, streams=True))
async def messages(request: Request) -> Response:
    """Answer a conversation, as a stream of events or in one response."""
    body, service = await body_of(MessagesBody, request)
    body.check_budget(request.headers.get("anthropic-beta", ""))
    job = await prepared(_prepare, body, service)
    await check(job, service)
    omits = body.thinking is not None and body.thinking.display == "omitted"
    answer = MessageAnswer(job.id, body.model or service.model_names[0], omits_thinking=omits)
    usage = Usage(len(job.prompt_ids))
    if body.stream:
        tap = Tap[Step](partial(_written, answer, usage))
        events = _events(job, service, answer, usage, tap)
        return await EventStream.begun(events, failed=failed, ping=PING, tap=tap)
    async with aclosing(steps(job, service, usage)) as found:
        events = [each async for step in found for each in answer.events(step, usage)]
    return Response(json.dumps(joined(events)), media_type="application/json")


@router.post("/v1/messages/count_tokens", openapi_extra=described(CountBody))
async def count_tokens(request: Request) -> dict[str, int]:
    """The number of tokens in a conversation's prompt."""
    body, service = await body_of(CountBody, request)
    return {"input_tokens": len((await asyncio.to_thread(partial(_prompt, is_asked=False), body, service)).ids)}


def failed(error: ApiError) -> str:
    """The last event of a stream that fails after its status line was sent."""
    return event(anthropic_envelope(error), "error")


def _prepare(body: MessagesBody, service: Service) -> Job:
    names = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "structured_outputs": body.wanted()[1],
        "thinking_token_budget": "thinking.budget_tokens",
    }
    prompt = _prompt(body, service)
    _check_room(len(prompt.ids), body.max_tokens, service.engine.max_model_len)
    optional = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    with named(names):
        params = service.engine.defaults.params(
            **{name: value for name, value in optional.items() if value is not None},
            max_tokens=body.max_tokens,
            stop=body.stop_sequences,
            structured_outputs=prompt.structured,
            thinking_token_budget=None if body.thinking is None else body.thinking.budget_tokens,
            skip_special_tokens=False,
        )
    name = f"msg_{uuid.uuid4().hex}"
    return Job(
        name,
        prompt.ids,
        params,
        prompt.options(),
        prompt.reader,
        names,
        streams=body.stream,
        recording=prompt.recording,
    )


def _prompt(body: PromptFields, service: Service, *, is_asked: bool = True) -> Prompt:
    wanted, wanted_by = body.wanted()
    messages = messages_of(body.messages, body.system)
    if is_begun := messages[-1]["role"] == "assistant":
        _check_begun(messages[-1])
    with named({"structured_outputs": wanted_by}, "json"), _too_long():
        conversation = Conversation(
            messages=messages,
            tools=tools_of(body.tools),
            choice=body.choice(),
            template=_template_kwargs(body, service),
            wanted=None if wanted is None else StructuredOutputsParams(json=wanted.schema_),
            continues=is_begun,
        )
        return build_prompt(conversation, service, is_asked=is_asked)


def _check_begun(message: Message) -> None:
    """Raises RequestError for a final assistant message that the answer cannot continue."""
    if not message["content"].strip() or "tool_calls" in message:
        raise RequestError(
            "messages: a final assistant message is continued, so it needs text, and no tool_use", "messages"
        )


def _template_kwargs(body: PromptFields, service: Service) -> dict[str, Any]:
    given, thinking = body.thinking, None
    if given is not None:
        thinking = Thinking(type="disabled" if given.type == "disabled" else "enabled")
    elif not service.template.always_thinks:
        thinking = Thinking(type="disabled")
    clears = body.clears_thinking()
    effort = None if body.output_config is None else body.output_config.effort
    return template_kwargs(service.template, {} if clears is None else {"clear_thinking": clears}, thinking, effort)


def _check_room(prompt_tokens: int, max_tokens: int, most: int) -> None:
    """Refuse a too long request in Anthropic's wording: Claude Code parses it, and retries with fewer tokens."""
    if prompt_tokens >= most:
        raise _context_exceeded(f"prompt is too long: {prompt_tokens} tokens > {most - 1} maximum", "messages")
    if prompt_tokens + max_tokens > most:
        sizes = f"{prompt_tokens} + {max_tokens} > {most}"
        message = f"input length and `max_tokens` exceed context limit: {sizes}, decrease input length or `max_tokens`"
        raise _context_exceeded(f"{message} and try again", "max_tokens")


@contextmanager
def _too_long() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        raise _context_exceeded(f"prompt is too long: {error.message}", "messages") from None


def _context_exceeded(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


async def _events(
    job: Job, service: Service, answer: MessageAnswer, usage: Usage, tap: Tap[Step]
) -> AsyncGenerator[str, None]:
    async with aclosing(steps(job, service, usage, tap)) as found:  # a lost connection aborts the request at once
        async for step in found:
            if text := _written(answer, usage, step):
                yield text


def _written(answer: MessageAnswer, usage: Usage, step: Step) -> str:
    return "".join([event(each, each["type"]) for each in answer.events(step, usage)])
