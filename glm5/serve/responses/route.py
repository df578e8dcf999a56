"""/v1/responses: converts between OpenAI's items and token ids, and gives access to stored responses."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from glm5.common.errors import RequestError
from glm5.serve.generation.job import Job, Step, Usage, check, steps
from glm5.serve.generation.prompting import Conversation, build_prompt
from glm5.serve.generation.sampling_fields import fit
from glm5.serve.generation.thinking import template_kwargs
from glm5.serve.http.body import body_of, described, documented, log_once
from glm5.serve.http.call import caller
from glm5.serve.http.errors import ApiError, named
from glm5.serve.http.sse import EventStream, Tap, event
from glm5.serve.responses.answer import ResponseAnswer, WireEvent
from glm5.serve.responses.body import ResponsesBody
from glm5.serve.responses.items import items_of, messages_of, references_of
from glm5.serve.service.response_store import Item, Stored
from glm5.serve.service.service import Service, get_service

router = APIRouter()

_LIMIT = "max_output_tokens"


@router.post("/v1/responses", response_model=None, openapi_extra=described(ResponsesBody, streams=True))
async def responses(request: Request) -> Response:
    """Answer a conversation, as a stream of events or in one response."""
    body, service = await body_of(ResponsesBody, request)
    previous = await _previous(body, service)
    references = references_of(body.input)
    known = await service.shared.items(caller().name, references) if references else {}
    job, input_ = await asyncio.to_thread(_prepare, body, service, previous, known)
    await check(job, service)
    assert job.reader is not None
    answer = ResponseAnswer(job.id, body.model or service.model_names[0], body, job.params, job.reader)
    turn = _Turn(job, answer, input_, service)
    if body.stream:
        tap = Tap(turn.written)
        return await EventStream.begun(_events(turn, tap), failed=turn.failed, tap=tap)
    async with aclosing(turn.events()) as found:
        async for _ in found:
            pass
    return Response(json.dumps(answer.response), media_type="application/json")


@router.get("/v1/responses/{response_id}", responses=documented(400, 404))
async def stored_response(
    response_id: str, stream: bool = False, service: Service = Depends(get_service)
) -> dict[str, Any]:
    """A stored response of this API key."""
    if stream:
        raise ApiError(400, "stream is true; allowed: false, as stored responses are not streamed", param="stream")
    return (await _stored(response_id, service)).response


@router.delete("/v1/responses/{response_id}", responses=documented(404))
async def delete_response(response_id: str, service: Service = Depends(get_service)) -> dict[str, Any]:
    """Delete a stored response of this API key. Responses that continue it keep their conversation."""
    if not await service.shared.drop(caller().name, response_id):
        raise _no_such_response(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", responses=documented(400, 404))
async def cancel_response(response_id: str, service: Service = Depends(get_service)) -> dict[str, Any]:
    """Cancel a running response of this API key. It keeps the output generated so far."""
    num_ended = await service.abort(caller().name, response_id)
    response = (await _stored(response_id, service)).response
    if num_ended:
        return response | {"status": "cancelled"}
    status = response["status"]
    raise ApiError(400, f"the response is {status}; allowed: one that is in progress", param="response_id")


@router.get("/v1/responses/{response_id}/input_items", responses=documented(404))
async def input_items(
    response_id: str, limit: int = 20, order: str = "desc", after: str = "", service: Service = Depends(get_service)
) -> dict[str, Any]:
    """The input items of a stored response of this API key, the earlier conversation included."""
    stored = await _stored(response_id, service)
    items = [*stored.earlier, *stored.input]
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order!r:.60}; allowed: asc, desc", param="order")
    if not 1 <= limit <= 100:
        raise ApiError(400, f"limit is {limit}; allowed: 1 to 100", param="limit")
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after and after not in ids:
        raise ApiError(400, f"after is {after!r:.80}; allowed: the id of one of the items", param="after")
    rest = items[ids.index(after) + 1 :] if after else items
    page = rest[:limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(rest) > limit}


@dataclass(frozen=True)
class _Input:
    """The input of a response, and the items before it. `size`: bytes of both as JSON."""

    items: list[Item]
    earlier: list[Item]
    size: int


class _Turn:
    """Runs one request. With `store`, its response is stored while it runs and afterwards."""

    def __init__(self, job: Job, answer: ResponseAnswer, input_: "_Input", service: Service) -> None:
        self._job, self._answer, self._input = job, answer, input_
        self._service, self._tenant = service, caller().name
        self._usage = Usage(len(job.prompt_ids))

    async def events(self, tap: Tap[Step] | None = None) -> AsyncGenerator[list[WireEvent], None]:
        """The events of each step; `tap` gets what can be sent at once."""
        shared = self._service.shared
        if self._answer.body.store:
            await shared.keep(self._tenant, self._stored())
        try:
            async with aclosing(steps(self._job, self._service, self._usage, tap)) as found:  # a lost connection aborts
                async for step in found:
                    events = self.read(step)
                    if self._answer.body.store and self._answer.response["status"] != "in_progress":
                        # Before the client knows, which may ask for it at once.
                        await shared.replace(self._tenant, self._stored())
                    yield events
        finally:
            if self._answer.response["status"] == "in_progress":  # the client has disconnected, or the request failed
                shared.discard(self._tenant, self._job.id)

    def written(self, step: Step) -> str:
        """The events of a step, as they are sent."""
        return _text(self.read(step))

    def read(self, step: Step) -> list[WireEvent]:
        """Add a step to the response."""
        return list(self._answer.events(step, self._usage))

    def failed(self, error: ApiError) -> str:
        """The last events of a stream that fails after its status line was sent."""
        return "".join([event(each, each["type"]) for each in self._answer.failure(error)])

    def _stored(self) -> Stored:
        response, input_ = self._answer.response, self._input
        return Stored(response, input_.items, input_.earlier, input_.size + len(json.dumps(response)))


async def _events(turn: _Turn, tap: Tap[Step]) -> AsyncGenerator[str, None]:
    async with aclosing(turn.events(tap)) as found:
        async for events in found:
            if text := _text(events):
                yield text


def _text(events: list[WireEvent]) -> str:
    return "".join([event(each, each["type"]) for each in events])


def _prepare(
    body: ResponsesBody, service: Service, previous: Stored | None, known: dict[str, Item]
) -> tuple[Job, _Input]:
    body.check()
    for kind in body.offered.hosted:
        log_once(f"requests have tools of the type {kind!r:.60}, which this server does not run: left out", service)
    wanted, wanted_by = body.wanted()
    items, earlier = items_of(body.input, known), [] if previous is None else previous.items
    conversation = Conversation(
        messages=messages_of(earlier, items, body.instructions),
        tools=body.offered.functions,
        choice=body.choice(),
        template=_template_kwargs(body, service),
        wanted=wanted,
    )
    names = {"structured_outputs": wanted_by, "prompt": "input", "logprobs": "top_logprobs", "max_tokens": _LIMIT}
    with named({"structured_outputs": wanted_by, "reasoning_effort": "reasoning.effort"}):
        prompt = build_prompt(conversation, service, field="input")
    with named(names):
        params = body.params(
            service,
            max_tokens=fit(service, len(prompt.ids), body.max_output_tokens, prompt="input", limit=_LIMIT),
            logprobs=body.num_logprobs,
            structured_outputs=prompt.structured,
            skip_special_tokens=bool(body.skip_special_tokens),
        )
    options = prompt.options(priority=body.priority, cache_salt=body.cache_salt)
    name = f"resp_{uuid.uuid4().hex}"
    more = {"streams": body.stream, "recording": prompt.recording}
    job = Job(name, prompt.ids, params, options, prompt.reader, names, **more)
    size = len(json.dumps(items)) + (0 if previous is None else previous.size)
    return job, _Input(items, earlier, size)


def _template_kwargs(body: ResponsesBody, service: Service) -> dict[str, Any]:
    reasoning, given = body.reasoning, dict(body.chat_template_kwargs)
    if reasoning is not None and reasoning.context not in (None, "auto"):
        given.setdefault("clear_thinking", reasoning.context == "current_turn")
    effort = None if reasoning is None else reasoning.effort
    with named({"reasoning_effort": "reasoning.effort"}):
        return template_kwargs(service.template, given, None, effort)


async def _previous(body: ResponsesBody, service: Service) -> Stored | None:
    if body.previous_response_id is None:
        return None
    found = await service.shared.find(caller().name, body.previous_response_id)
    if found is None:
        got = f"previous_response_id is {body.previous_response_id!r:.80}, which is not stored (any more)"
        code = "previous_response_not_found"
        raise ApiError(400, f"{got}; allowed: a response of yours", param="previous_response_id", code=code)
    if found.response["status"] == "in_progress":
        raise RequestError("previous_response_id is of a response that is still in progress", "previous_response_id")
    return found


async def _stored(response_id: str, service: Service) -> Stored:
    found = await service.shared.find(caller().name, response_id)
    if found is None:
        raise _no_such_response(response_id)
    return found


def _no_such_response(response_id: str) -> ApiError:
    message = f"there is no response {response_id!r:.80} of yours (any more)"
    return ApiError(404, message, param="response_id", code="response_not_found")
