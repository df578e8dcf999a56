"""Listening, on a thread of its own: the main thread loads models, hears signals and decides when to end.

The socket listens before there is anything to serve. Until then, `Front` says so to everybody who asks.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from glm5.serve.errors import ApiError, error_response
from glm5.serve.service import Engine
from glm5.serve.state import ServerState

# For clients that do not read the end of their answer.
GOODBYE_SECONDS = 3.0
_POLL_SECONDS = 0.05
_IDLE_SECONDS = 75  # longer than proxies keep a connection that they may use again
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


def bind(host: str, port: int, client_timeout: float | None = None) -> socket.socket:
    """A socket with this address (port 0: a free one) that does not listen yet. Raises OSError naming the address.

    Connections whose client has vanished end after two minutes; those whose client leaves what was sent unread, after
    `client_timeout` seconds.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio would not switch off its delay: every answer would come 40 ms late.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What is set here holds for every connection that is accepted.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            _set_tcp(listener, name, value)
        if client_timeout is not None:
            _set_tcp(listener, "TCP_USER_TIMEOUT", round(client_timeout * 1000))
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds the socket's server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Front:
    """ASGI: the application once there is one (`app`), and before that 503 to everybody, /health too."""

    def __init__(self, state: ServerState):
        self.app: ASGIApp | None = None
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            why = self.state.not_serving or "it is being started"
            error = ApiError(503, f"the model does not answer yet: {why}", code="starting", retry_after=5)
            await error_response(error, scope["path"])(scope, receive, send)


class Server:
    """An application behind a socket, served on a thread from `start` to `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket):
        self.url = url_of(listener)
        self._server = _Server(app)
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="glm5-server", daemon=True)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Returns when the socket listens. Raises RuntimeError if it never will."""
        self._thread.start()
        self._server.settled.wait()
        if not self._server.started:
            raise RuntimeError("the server did not start; its log says why")

    def stop(self, seconds: float = GOODBYE_SECONDS, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Take no more connections, and end those that are there: answers under way get this long, or until it becomes
        urgent."""
        self._server.config.timeout_graceful_shutdown = max(1, round(seconds))
        self._server.should_exit = True
        while self._thread.is_alive() and not is_urgent():
            self._thread.join(_POLL_SECONDS)
        self._server.force_exit = True
        self._thread.join(GOODBYE_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve([self._listener]))
        finally:
            self._server.settled.set()


@contextmanager
def serving(app: ASGIApp, engine: Engine, listener: socket.socket) -> Iterator[str]:
    """Serve while the block runs; gives the URL. Closes engine and socket at the end."""
    server = Server(app, listener)
    server.start()
    try:
        yield server.url
    finally:
        engine.close()
        server.stop()


class _Server(uvicorn.Server):
    """Logs to the handlers that the command line set up. `settled`: it listens, or has given up."""

    def __init__(self, app: ASGIApp):
        # h11 and asyncio are always there: the same server on every machine.
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=_IDLE_SECONDS,
            )
        )
        self.settled = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.settled.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the main thread's."""
        yield


def _set_tcp(listener: socket.socket, name: str, value: int) -> None:
    with suppress(AttributeError, OSError):  # Linux has them all, others some
        listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
