"""The server of a trainer, beside its engine: agents speak to the policy through it, each in a session of its own."""

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.config.serve import ServeConfig
from glm5.engine import AsyncEngine
from glm5.rl.gateway.session import Ruled, Session
from glm5.serve.app import create_app
from glm5.serve.http.keys import KeyRing, plain_keys
from glm5.serve.http.server import Server, bind
from glm5.serve.service.sessions import Sessions

MODEL = "policy"
_MOST, _MOST_ANSWERS = 2**20, 2**16


class Gateway:
    """See `glm5.rl.rollouts.program.Gateway`."""

    def __init__(self, url: str, key: str, tenant: str, sessions: Sessions, environment: Mapping[str, str]) -> None:
        self._url, self.key, self._tenant, self._sessions = url, key, tenant, sessions
        self.environment = environment

    def begin(self, name: str, ruled: Ruled) -> str:
        self._sessions.begin(self._tenant, name, ruled)
        return f"{self._url}/sessions/{name}"

    def end(self, name: str) -> Session:
        session = self._sessions.end(self._tenant, name)
        assert session is not None, "it has begun"
        return session


@contextmanager
def gateway(
    engine: AsyncEngine, template: ChatTemplate, tokenizer: Tokenizer, *, environment: Mapping[str, str]
) -> Iterator[Gateway]:
    """A gateway on a free port of this machine, with a key of its own. `environment`: see `Gateway`."""
    key = secrets.token_urlsafe(24)
    config = ServeConfig(model=MODEL, max_sessions=_MOST, max_queue=_MOST_ANSWERS)
    (own,) = plain_keys([key], "user", "agents")
    app = create_app(engine, template, tokenizer, config, keys=KeyRing([own]))
    log = logging.getLogger("glm5.serve")
    level = log.level
    log.setLevel(logging.WARNING)  # it would log a line for each request
    server = Server(app, bind("127.0.0.1", 0))
    server.start()
    try:
        yield Gateway(server.url, key, own.name, app.state.service.sessions, environment)
    finally:
        server.stop()
        log.setLevel(level)
