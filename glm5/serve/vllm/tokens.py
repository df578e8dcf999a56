"""POST /tokenize and /detokenize, with vLLM's request and response fields."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field

from glm5.common.errors import RequestError
from glm5.serve.chat.body import ChatBody
from glm5.serve.chat.route import conversation_of
from glm5.serve.generation.logprobs import TokenTexts
from glm5.serve.generation.prompting import build_prompt
from glm5.serve.http.body import Body, body_of, described
from glm5.serve.service.service import Service

router = APIRouter()


class TokenizeBody(ChatBody):
    """POST /tokenize: `prompt`, a text, or `messages` with the other fields of a chat completion."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"chat_template": (), "mm_processor_kwargs": ({},)}

    messages: list[Any] = []
    prompt: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=2**21)]


@router.post("/tokenize", openapi_extra=described(TokenizeBody))
async def tokenize(request: Request) -> dict[str, Any]:
    """Token ids of a text, or of a conversation's prompt."""
    body, service = await body_of(TokenizeBody, request)
    ids, names = await asyncio.to_thread(_spelled, body, service)
    return {"count": len(ids), "max_model_len": service.engine.max_model_len, "tokens": ids, "token_strs": names}


@router.post("/detokenize", openapi_extra=described(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, str]:
    """Text of token ids, special tokens included."""
    body, service = await body_of(DetokenizeBody, request)
    return {"prompt": await asyncio.to_thread(service.tokenizer.decode, body.tokens)}


def _spelled(body: TokenizeBody, service: Service) -> tuple[list[int], list[str] | None]:
    """Token ids, and their texts if requested."""
    ids = _ids(body, service)
    return ids, list(map(TokenTexts(service.tokenizer).name, ids)) if body.return_token_strs else None


def _ids(body: TokenizeBody, service: Service) -> list[int]:
    if (body.prompt is None) == (not body.messages):
        raise RequestError("prompt and messages: exactly one of them is needed", "prompt")
    if body.prompt is None:
        return build_prompt(conversation_of(body, service), service, is_asked=False).ids
    try:
        return service.tokenizer.encode(body.prompt)
    except RequestError as error:
        raise RequestError(str(error), "prompt") from None
