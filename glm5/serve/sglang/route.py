"""POST /generate and /abort_request: SGLang's own API, which its load generator and RL trainers use."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from glm5.common.errors import RequestError
from glm5.engine.frontend.request_builder import Options
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.chat.route import failed
from glm5.serve.generation.job import Job, Step, Usage, check_all, merged, steps
from glm5.serve.generation.sampling_fields import context_exceeded, fit
from glm5.serve.http.body import body_of, described, log_unknown
from glm5.serve.http.call import caller
from glm5.serve.http.errors import named
from glm5.serve.http.sse import DONE, EventStream, Tap
from glm5.serve.service.service import Service
from glm5.serve.sglang.answer import Answers, PromptSpec
from glm5.serve.sglang.body import DEFAULT_LENGTH, AbortBody, GenerateBody, LogprobRange, SamplingOptions, TextOrIds

router = APIRouter()


@router.post("/generate", response_model=None, openapi_extra=described(GenerateBody, streams=True))
async def generate(request: Request) -> Response:
    """Continue one prompt or several: token ids in, token ids and their log-probabilities out."""
    body, service = await body_of(GenerateBody, request)
    jobs, answers, is_list = await asyncio.to_thread(_prepare, body, service)
    await check_all(jobs, service)
    usages = [Usage(len(job.prompt_ids)) for job in jobs]
    if body.stream:
        write = partial(_event, usages, answers, is_list=is_list)
        tap = Tap[Step](partial(write, 0)) if len(jobs) == 1 else None
        return await EventStream.begun(_events(_steps(jobs, service, usages, tap), write), failed=failed, tap=tap)
    async with aclosing(_steps(jobs, service, usages)) as found:
        async for number, step in found:
            answers.take(number, step, usages[number].cached_tokens)
    whole = answers.all_written()
    return Response(f"[{', '.join(whole)}]" if is_list else whole[0], media_type="application/json")


@router.post("/abort_request", openapi_extra=described(AbortBody))
async def abort_request(request: Request) -> dict[str, Any]:
    """Abort requests of this API key, sent through any API: one by its id, or all. They return their output so far."""
    body, service = await body_of(AbortBody, request)
    if not body.rid and not body.abort_all:
        got = "missing" if body.rid is None else "empty"
        raise RequestError(f"rid is {got}; allowed: the id of a request, or abort_all true", "rid")
    num_ended = await service.abort(caller().name, None if body.abort_all else body.rid)
    return {"success": True, "message": f"{num_ended} requests are aborted", "num_ended": num_ended}


def _prepare(body: GenerateBody, service: Service) -> tuple[list[Job], Answers, bool]:
    prompts, is_batch = body.prompts()
    count = len(prompts)
    options, logprobs, salts = body.options(count), body.logprobs(count), body.salts(count)
    names = body.ids(count, is_batch=is_batch) or [uuid.uuid4().hex for _ in prompts]
    for one in options:
        log_unknown(one, service, "sampling_params.")
    jobs: list[Job] = []
    specs: list[PromptSpec] = []
    for prompt, sampling, some, salt, name in zip(prompts, options, logprobs, salts, names, strict=True):
        ids = _ids_of(prompt, service)
        known_as = sampling.names() | {"prompt": "text" if isinstance(prompt, str) else "input_ids"}
        known_as["thinking_token_budget"] = "max_thinking_tokens"
        with named(known_as):
            params = _params(body, sampling, some, ids, service)
        # In SGLang a higher number means a higher priority.
        more = Options(priority=-body.priority, cache_salt=salt, routed_experts=body.return_routed_experts)
        known_as["routed_experts"] = "return_routed_experts"
        jobs.append(Job(name, ids, params, more, names=known_as, streams=body.stream))
        spec = PromptSpec(name, ids, some, omits_output=sampling.max_new_tokens == 0)
        specs.append(
            replace(
                spec,
                tokenizer=service.tokenizer if body.return_text_in_logprobs else None,
                experts_from=body.routed_experts_start_len if body.return_routed_experts else None,
                returns_prompt_ids=body.return_prompt_token_ids,
            )
        )
    num_answers = options[0].n
    return jobs, Answers(specs, num_answers, service), is_batch or num_answers > 1


def _params(
    body: GenerateBody, sampling: SamplingOptions, logprobs: LogprobRange, ids: Sequence[int], service: Service
) -> SamplingParams:
    wanted, where = sampling.max_new_tokens, "sampling_params.max_new_tokens"
    if wanted is not None and wanted < 0:
        raise RequestError(f"{where} is {wanted}; allowed: at least 0", where)
    prompt = "text" if body.input_ids is None else "input_ids"
    is_given = "max_new_tokens" in sampling.model_fields_set
    # With max_new_tokens 0 the engine generates one token, which is not returned.
    max_tokens = max(1, wanted) if is_given and wanted is not None else None
    most = fit(service, len(ids), max_tokens, prompt=prompt, limit=where)
    num_logprobs = logprobs.num_logprobs if logprobs.enabled else None
    return sampling.params(
        max_tokens=most if is_given else min(most, DEFAULT_LENGTH),
        logprobs=num_logprobs,
        prompt_logprobs=num_logprobs if logprobs.of_prompt(len(ids)) else None,
        thinking_token_budget=body.max_thinking_tokens,
    )


def _ids_of(prompt: TextOrIds, service: Service) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    most = service.engine.max_model_len
    if (least := service.tokenizer.least_tokens(prompt)) > most:
        raise context_exceeded(most, f"at least {least}", param="text")
    try:
        return service.tokenizer.encode(prompt)
    except RequestError as error:
        raise RequestError(str(error), "text") from None


def _steps(
    jobs: Sequence[Job], service: Service, usages: Sequence[Usage], tap: Tap[Step] | None = None
) -> AsyncGenerator[tuple[int, Step], None]:
    return merged([steps(job, service, usage, tap) for job, usage in zip(jobs, usages, strict=True)])


async def _events(
    parts: AsyncGenerator[tuple[int, Step], None], write: Callable[[int, Step], str]
) -> AsyncGenerator[str, None]:
    async with aclosing(parts) as found:
        async for number, step in found:
            if text := write(number, step):
                yield text
    yield DONE


def _event(usages: Sequence[Usage], answers: Answers, number: int, step: Step, *, is_list: bool) -> str:
    """The event of a step of prompt `number`, or an empty text."""
    place = answers.take(number, step, usages[number].cached_tokens)
    if not (step.text or step.token_ids or step.finish_reason):
        return ""
    place_in_list = f', "index": {place}}}' if is_list else "}"
    return f"data: {answers.written(place)[:-1]}{place_in_list}\n\n"
