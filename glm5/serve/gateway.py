"""The server of a trainer, in front of its engines: agents speak to the policy by it, each in a session of its own.

One server, with one event loop, is for all engines: a request goes to the engine that its session was begun with.
"""

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.config.serve import ServeConfig
from glm5.engine import AsyncEngine
from glm5.rl.gateway.session import Ruled, Session
from glm5.serve.app import create_app
from glm5.serve.http.call import current
from glm5.serve.http.errors import ApiError
from glm5.serve.http.keys import KeyRing, plain_keys
from glm5.serve.http.server import Server, bind
from glm5.serve.service.sessions import Sessions

MODEL = "policy"
_MOST, _MOST_ANSWERS = 2**20, 2**16


class Gateway:
    """See `glm5.rl.rollouts.program.Gateway`."""

    def __init__(
        self,
        url: str,
        key: str,
        tenant: str,
        sessions: Sessions,
        engine_of: dict[str, AsyncEngine],
        environment: Mapping[str, str],
    ) -> None:
        self._url, self.key, self._tenant, self._sessions = url, key, tenant, sessions
        self._engine_of, self.environment = engine_of, environment

    def begin(self, name: str, ruled: Ruled, engine: AsyncEngine) -> str:
        self._engine_of[name] = engine
        self._sessions.begin(self._tenant, name, ruled)
        return f"{self._url}/sessions/{name}"

    def end(self, name: str) -> Session:
        del self._engine_of[name]
        session = self._sessions.end(self._tenant, name)
        assert session is not None, "it has begun"
        return session


class _EngineOfSession:
    """The engine of the current request's session. Raises ApiError for a request of none, or after its end."""

    def __init__(self, engine_of: Mapping[str, AsyncEngine]) -> None:
        self._engine_of = engine_of

    def __getattr__(self, name: str) -> Any:
        call = current()
        engine = None if call is None else self._engine_of.get(call.session)
        if engine is None:
            raise ApiError(404, "the request is of no session that goes on; use the base URL that was given")
        return getattr(engine, name)


@contextmanager
def gateway(template: ChatTemplate, tokenizer: Tokenizer, *, environment: Mapping[str, str]) -> Iterator[Gateway]:
    """A gateway on a free port of this machine, with a key of its own. `environment`: see `Gateway`."""
    key = secrets.token_urlsafe(24)
    config = ServeConfig(model=MODEL, max_sessions=_MOST, max_queue=_MOST_ANSWERS)
    (own,) = plain_keys([key], "user", "agents")
    engine_of = dict[str, AsyncEngine]()
    engines: Any = _EngineOfSession(engine_of)
    app = create_app(engines, template, tokenizer, config, keys=KeyRing([own]))
    log = logging.getLogger("glm5.serve")
    level = log.level
    log.setLevel(logging.WARNING)  # it would log a line for each request
    server = Server(app, bind("127.0.0.1", 0))
    server.start()
    try:
        yield Gateway(server.url, key, own.name, app.state.service.sessions, engine_of, environment)
    finally:
        server.stop()
        log.setLevel(level)
