"""vLLM's POST /v1/completions/render: token ids of prompts, without generating."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from glm5.serve.completions.body import CompletionBody
from glm5.serve.completions.route import prepare
from glm5.serve.generation.rendered import rendered
from glm5.serve.http.body import body_of, described
from glm5.serve.http.call import answer_id

router = APIRouter()


@router.post("/v1/completions/render", openapi_extra=described(CompletionBody))
async def render_completions(request: Request) -> list[dict[str, Any]]:
    """Each prompt in token ids, and its sampling parameters. Nothing is generated."""
    body, service = await body_of(CompletionBody, request)
    _, jobs = await asyncio.to_thread(prepare, body, service, answer_id("cmpl-", body.request_id))
    return [rendered(job, body, service) for job in jobs]
