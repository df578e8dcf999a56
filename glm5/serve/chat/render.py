"""vLLM's POST /v1/chat/completions/render: token ids of a conversation, without generating."""

import asyncio
from typing import Any

from fastapi import APIRouter, Depends

from glm5.serve.chat.body import ChatBody
from glm5.serve.chat.route import prepare
from glm5.serve.generation.rendered import rendered
from glm5.serve.http.body import body_of, described
from glm5.serve.service.service import Service, get_service

router = APIRouter()


@router.post("/v1/chat/completions/render", openapi_extra=described(ChatBody))
async def render_chat(
    body: ChatBody = Depends(body_of(ChatBody)), service: Service = Depends(get_service)
) -> dict[str, Any]:
    """The prompt of a conversation in token ids, and its sampling parameters. Nothing is generated."""
    return rendered(await asyncio.to_thread(prepare, body, service), body, service)
