"""The context of an HTTP request: its id, tenant and share of the limits, for all tasks that work on it.

The middleware makes a `Call` and stores it in a context variable, from which the request's tasks read it: `current()`.
So the engine gets the tenant of each request, without every API passing it on.
"""

import uuid
from contextvars import ContextVar
from dataclasses import dataclass

from glm5.serve.http.keys import ANYONE, Tenant


@dataclass
class Call:
    """`session`: the client's X-Session-ID, by which routers send a session to one server, or that of its path, if
    `is_session_path`. `places`: how many of the server's concurrent answers it occupies, 0 for a route without limits.
    `num_answers`: how many answers it has requested from the engine. `number`: where another process keeps the limits,
    the request's number there. `num_bytes`: of its body."""

    id: str
    tenant: Tenant = ANYONE
    session: str = ""
    is_session_path: bool = False
    places: int = 0
    num_answers: int = 0
    number: int = 0
    num_bytes: int = 0


_CURRENT: ContextVar[Call | None] = ContextVar("glm5-call", default=None)


def current() -> Call | None:
    """The request that this task works on; None outside of a request."""
    return _CURRENT.get()


def caller() -> Tenant:
    """The tenant of the current request; ANYONE outside of a request."""
    call = current()
    return ANYONE if call is None else call.tenant


def answer_id(prefix: str, own: str | None = None) -> str:
    """The id of an answer: the request id from the body (`own`), else from X-Request-Id, with a prefix."""
    call = current()
    return f"{prefix}{own or (uuid.uuid4().hex if call is None else call.id)}"


def begin(call: Call) -> None:
    """Make this the current request of this task, and of the tasks that it starts."""
    _CURRENT.set(call)
