"""One HTTP request on its way through the server, known to everything that it causes.

The middleware makes a `Call` and lays it where the request's own tasks find it: `current()`. So the engine is asked in
the name of its caller by every API, though none passes the caller on.
"""

import uuid
from contextvars import ContextVar
from dataclasses import dataclass

from glm5.serve.http.keys import ANYONE, Tenant


@dataclass
class Call:
    """`places`: how many answers it takes from the server at the same time, 0 where it is not counted.
    `num_answers`: how many it has asked of the engine."""

    id: str
    tenant: Tenant = ANYONE
    places: int = 0
    num_answers: int = 0


_CURRENT: ContextVar[Call | None] = ContextVar("glm5-call", default=None)


def current() -> Call | None:
    """The request that this task works for; None outside of one."""
    return _CURRENT.get()


def caller() -> Tenant:
    """Whose request it is; anyone's outside of one."""
    call = current()
    return ANYONE if call is None else call.tenant


def answer_id(prefix: str, own: str | None = None) -> str:
    """The name of an answer: after what the client calls its request, in the body (`own`) or in X-Request-Id."""
    call = current()
    return f"{prefix}{own or (uuid.uuid4().hex if call is None else call.id)}"


def begin(call: Call) -> None:
    """What is done from here on, in this task and those that it starts, is done for this request."""
    _CURRENT.set(call)
