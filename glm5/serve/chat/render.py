"""vLLM's POST /v1/chat/completions/render: token ids of a conversation, without generating."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from glm5.serve.chat.body import ChatBody
from glm5.serve.chat.route import prepare
from glm5.serve.generation.rendered import rendered
from glm5.serve.http.body import body_of, described

router = APIRouter()


@router.post("/v1/chat/completions/render", openapi_extra=described(ChatBody))
async def render_chat(request: Request) -> dict[str, Any]:
    """The prompt of a conversation in token ids, and its sampling parameters. Nothing is generated."""
    body, service = await body_of(ChatBody, request)
    return rendered(await asyncio.to_thread(prepare, body, service), body, service)
