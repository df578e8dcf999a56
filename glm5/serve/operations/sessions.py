"""GET and DELETE /sessions/NAME: what an agent's requests have made, as a tree of token segments.

An agent names its session by the header X-Session-ID, or by a base URL that ends with /sessions/NAME (and /v1, where
its client expects that). Everything that it asks in any API then goes on from the same tree.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Depends

from glm5.rl.gateway.session import Session
from glm5.serve.http.body import documented
from glm5.serve.http.call import caller
from glm5.serve.http.errors import ApiError
from glm5.serve.service.service import Service, get_service
from glm5.serve.service.sessions import NO_SESSIONS

router = APIRouter(tags=["sessions"])


@router.get("/sessions/{name}", responses=documented(404))
async def session(name: str, service: Service = Depends(get_service)) -> dict[str, Any]:
    """The session's segments; a parent comes before its children."""
    return await asyncio.to_thread(_shown, name, _needed(name, service, end=False))


@router.delete("/sessions/{name}", responses=documented(403, 404))
async def end_session(name: str, service: Service = Depends(get_service)) -> dict[str, Any]:
    """The same; the session is not kept any longer."""
    return await asyncio.to_thread(_shown, name, _needed(name, service, end=True))


def _needed(name: str, service: Service, *, end: bool) -> Session:
    if service.sessions is None:
        raise ApiError(404, NO_SESSIONS, code="no_sessions")
    found = service.sessions.find(caller().name, name)
    if end and found is not None and found.ruled is not None:
        raise ApiError(403, "the trainer that began this session ends it", code="not_yours")
    if end:
        found = service.sessions.end(caller().name, name)
    if found is None:
        raise ApiError(404, f"there is no session {name!r:.60}", code="not_found")
    return found


def _shown(name: str, session: Session) -> dict[str, Any]:
    abandoned = session.abandoned()
    segments = [
        {
            "token_ids": one.token_ids,
            "parent": one.parent,
            "sampled": one.is_sampled,
            "logprobs": one.logprobs,
            "versions": one.versions,
            "abandoned": index in abandoned,
        }
        for index, one in enumerate(list(session.tree.segments))
    ]
    return {"session": name, "segments": segments, "forks": session.num_forks}
