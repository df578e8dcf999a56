"""vLLM's POST /v1/completions/render: token ids of prompts, without generating."""

import asyncio
from typing import Any

from fastapi import APIRouter, Depends

from glm5.serve.completions.body import CompletionBody
from glm5.serve.completions.route import prepare
from glm5.serve.generation.rendered import rendered
from glm5.serve.http.body import body_of, described
from glm5.serve.http.call import answer_id
from glm5.serve.service.service import Service, get_service

router = APIRouter()


@router.post("/v1/completions/render", openapi_extra=described(CompletionBody))
async def render_completions(
    body: CompletionBody = Depends(body_of(CompletionBody)), service: Service = Depends(get_service)
) -> list[dict[str, Any]]:
    """Each prompt in token ids, and its sampling parameters. Nothing is generated."""
    _, jobs = await asyncio.to_thread(prepare, body, service, answer_id("cmpl-", body.request_id))
    return [rendered(job, body, service) for job in jobs]
