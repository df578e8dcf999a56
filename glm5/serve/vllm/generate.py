"""POST /inference/v1/generate: vLLM's route for trainers and environments. Token ids in, token ids out."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from glm5.common.errors import RequestError
from glm5.engine.frontend.request_builder import Options
from glm5.serve.chat.route import failed
from glm5.serve.generation.job import Job, Usage, check, steps
from glm5.serve.generation.sampling_fields import fit
from glm5.serve.http.body import body_of, described
from glm5.serve.http.call import answer_id
from glm5.serve.http.errors import named
from glm5.serve.http.sse import DONE, EventStream
from glm5.serve.service.service import Service
from glm5.serve.vllm.generate_answer import GenerateAnswer, written
from glm5.serve.vllm.generate_body import NAMES, GenerateBody, Sampling

MAX_LISTED = 2048
"""Token ids of a sampling mask, which is a list in JSON. As in vLLM."""

router = APIRouter()


@router.post("/inference/v1/generate", response_model=None, openapi_extra=described(GenerateBody, streams=True))
async def generate(request: Request) -> Response:
    """Continue token ids: token ids and their log-probabilities out, as a stream of chunks or in one response."""
    body, service = await body_of(GenerateBody, request)
    # Checking a million token ids takes a while.
    job, sampling = await asyncio.to_thread(_prepare, body, service)
    await check(job, service)
    answer, usage = GenerateAnswer(body, job, service, sampling.experts_from), Usage(len(job.prompt_ids))
    if body.stream:
        return await EventStream.begun(_events(job, service, answer, usage), failed=failed)
    async with aclosing(steps(job, service, usage)) as found:
        content = answer.whole([step async for step in found], usage)
    return Response(written(content), media_type="application/json")


def _prepare(body: GenerateBody, service: Service) -> tuple[Job, Sampling]:
    body.check()
    sampling, num_prompt = body.sampling(), len(body.token_ids)
    room = fit(service, num_prompt, None, prompt="token_ids", limit=NAMES["max_tokens"])
    if sampling.max_tokens is not None:  # as in vLLM's route, an answer may end where the context does
        room = min(sampling.max_tokens, service.engine.max_model_len - num_prompt)
    with named(NAMES):
        params = sampling.params(room)
        masks = service.sampling_masks and params.truncates
        if masks and not 0 < params.top_k <= MAX_LISTED:
            allowed = f"1 to {MAX_LISTED} with sampling masks, which list up to top_k token ids for each token"
            raise RequestError(f"top_k is {params.top_k}; allowed: {allowed}", "top_k")
    options = Options(
        priority=body.priority,
        cache_salt=body.cache_salt,
        routed_experts=service.routed_experts,
        sampling_mask=masks,
    )
    name = answer_id("generate-tokens-", body.request_id)
    return Job(name, body.token_ids, params, options, names=NAMES, processed=True, streams=body.stream), sampling


async def _events(job: Job, service: Service, answer: GenerateAnswer, usage: Usage) -> AsyncGenerator[str, None]:
    async with aclosing(steps(job, service, usage)) as found:  # a lost connection aborts the request at once
        async for step in found:
            if (chunk := answer.chunk(step, usage)) is not None:
                yield f"data: {written(chunk)}\n\n"
    if answer.body.includes_usage:
        yield f"data: {written(answer.last_chunk(usage))}\n\n"
    yield DONE
