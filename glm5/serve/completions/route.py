"""POST /v1/completions: continues one text or several."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from glm5.common.errors import RequestError
from glm5.engine.frontend.request_builder import Options
from glm5.rl.gateway.session import Session
from glm5.serve.chat.route import failed
from glm5.serve.completions.answer import CompletionAnswer, PromptInput
from glm5.serve.completions.body import CompletionBody, TextOrIds
from glm5.serve.generation.job import Job, Step, Usage, check_all, merged, steps
from glm5.serve.generation.prompting import session_of
from glm5.serve.generation.sampling_fields import context_exceeded, fit
from glm5.serve.http.body import body_of, described
from glm5.serve.http.call import answer_id
from glm5.serve.http.errors import named
from glm5.serve.http.sse import DONE, EventStream, Tap, event
from glm5.serve.service.service import Service
from glm5.serve.service.sessions import Recording

router = APIRouter()


@router.post("/v1/completions", response_model=None, openapi_extra=described(CompletionBody, streams=True))
async def completions(request: Request) -> Response:
    """Continue one or more prompts, as a stream of chunks or in one response."""
    body, service = await body_of(CompletionBody, request)
    name = answer_id("cmpl-", body.request_id)
    prompts, jobs = await asyncio.to_thread(prepare, body, service, name)
    await check_all(jobs, service)
    answer = CompletionAnswer(body, name, body.model or service.model_names[0], prompts, body.formatter(service))
    if body.stream:
        usages = _usages(jobs)
        # Steps of several prompts wait in a queue, where those of a tap would overtake them.
        tap = Tap[Step](partial(_event, answer, usages, 0), answer.plain_events) if len(jobs) == 1 else None
        return await EventStream.begun(_events(jobs, service, answer, usages, tap), failed=failed, tap=tap)
    usages = _usages(jobs)
    async with aclosing(_steps(jobs, service, usages)) as found:
        parts = [part async for part in found]
    return Response(json.dumps(answer.completion(parts, _total(usages, body))), media_type="application/json")


def prepare(body: CompletionBody, service: Service, name: str) -> tuple[list[PromptInput], list[Job]]:
    """The prompts, and their requests as the engine gets them. Raises RequestError."""
    body.check()
    wanted, wanted_by = body.constraint()
    session, request = session_of(service, is_asked=body.max_tokens > 0), object()
    found = [_prompt_input(prompt, service, session, request) for prompt in body.prompts()]
    prompts = [prompt_input for prompt_input, _ in found]
    names, most = {"structured_outputs": wanted_by}, max(1, body.max_tokens)
    with named(names):  # built once: validating the constraint for each prompt would repeat the work
        params = body.params(
            service,
            max_tokens=most,
            logprobs=body.logprobs,
            prompt_logprobs=_prompt_logprobs(body),
            structured_outputs=wanted,
        )
    jobs: list[Job] = []
    for number, (prompt_input, recording) in enumerate(found):
        fit(service, len(prompt_input.ids), most, prompt="prompt", limit="max_tokens")
        options = Options(priority=body.priority, cache_salt=body.cache_salt)
        job_id = name if len(prompts) == 1 else f"{name}_{number}"
        job = Job(job_id, prompt_input.ids, params, options, names=names, streams=body.stream, recording=recording)
        jobs.append(job)
    return prompts, jobs


def _prompt_input(
    prompt: TextOrIds, service: Service, session: Session | None, request: object
) -> tuple[PromptInput, Recording | None]:
    """A prompt, in a session with the tokens that it has, and where its answers go. `request`: the same for all prompts
    of one request."""
    text = prompt if isinstance(prompt, str) else None
    most = service.engine.max_model_len
    if text is not None and (least := service.tokenizer.least_tokens(text)) > most:
        raise context_exceeded(most, f"at least {least}", param="prompt")
    try:
        if session is not None:
            placed = session.place_text(prompt, service.tokenizer)
            placed.request = request
            return PromptInput(text, placed.ids), Recording(session, placed)
        ids = service.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return PromptInput(text, ids), None
    except RequestError as error:
        raise RequestError(str(error), "prompt") from None


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """The larger of `prompt_logprobs`, and of `logprobs` if the prompt is echoed."""
    echoed = body.logprobs if body.echo else None
    wanted = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return max(wanted, default=None)


async def _events(
    jobs: Sequence[Job], service: Service, answer: CompletionAnswer, usages: Sequence[Usage], tap: Tap[Step] | None
) -> AsyncGenerator[str, None]:
    async with aclosing(_steps(jobs, service, usages, tap)) as found:
        async for number, step in found:
            if text := _event(answer, usages, number, step):
                yield text
    if answer.body.includes_usage:
        yield event(answer.last_chunk(_total(usages, answer.body)))
    yield DONE


def _event(answer: CompletionAnswer, usages: Sequence[Usage], number: int, step: Step) -> str:
    """The chunk of a step of prompt `number`, or an empty text."""
    usage = _total(usages, answer.body) if answer.body.repeats_usage else None
    return answer.event(number, step, usage)


def _usages(jobs: Sequence[Job]) -> list[Usage]:
    return [Usage(len(job.prompt_ids)) for job in jobs]


def _steps(
    jobs: Sequence[Job], service: Service, usages: Sequence[Usage], tap: Tap[Step] | None = None
) -> AsyncGenerator[tuple[int, Step], None]:
    return merged([steps(job, service, usage, tap) for job, usage in zip(jobs, usages, strict=True)])


def _total(usages: Sequence[Usage], body: CompletionBody) -> Usage:
    """The usage of all prompts. With max_tokens 0, the one token that the engine generates is not counted."""
    total = Usage(0)
    for usage in usages:
        total.add(usage)
    return total if body.max_tokens else replace(total, completion_tokens=0)
