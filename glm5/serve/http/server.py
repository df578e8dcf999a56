"""Listening, on a thread of its own: the main thread loads models, hears signals and decides when to end.

The socket listens before there is anything to serve. Until then, `Front` says so to everybody who asks.
"""

import asyncio
import errno
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from glm5.serve.http.connections import ACCEPTS_AT_ONCE, Connection, Crowd
from glm5.serve.http.errors import ApiError, error_response
from glm5.serve.service.service import Engine
from glm5.serve.service.state import ServerState

# For clients that do not read the end of their answer.
GOODBYE_SECONDS = 3.0
# For the headers of a request, where nobody says otherwise.
CLIENT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_BACKLOG = 2048  # connections that the kernel keeps until they are accepted
_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # with one of them, to connect to
_HINTS = {
    errno.EADDRINUSE: "; choose another --port, or 0 for a free one",
    errno.EACCES: "; ports from 1024 on are open to all",
    errno.EADDRNOTAVAIL: "; allowed: an address of this machine, or 0.0.0.0 for all",
}
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


def bind(host: str, port: int, client_timeout: float | None = None) -> socket.socket:
    """A socket that listens at this address (port 0: a free one). Raises OSError naming the address.

    Connections whose client has vanished end after two minutes; those whose client leaves what was sent unread, after
    `client_timeout` seconds.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        # Named as TCP, or asyncio would not switch off its delay: every answer would come 40 ms late.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            _prepare(listener, client_timeout)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _cannot_listen(host, port, f"{error.strerror}{_HINTS.get(error.errno or 0, '')}") from None
    except ValueError:  # a text that can be no name
        raise _cannot_listen(host, port, "this is neither an address nor a name") from None
    return listener


def _cannot_listen(host: str, port: int, why: str) -> OSError:
    return OSError(f"cannot listen on {host:.80} port {port}: {why}")


def _prepare(listener: socket.socket, client_timeout: float | None) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # What is set here holds for every connection that is accepted.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        _set_tcp(listener, name, value)
    if client_timeout is not None:
        _set_tcp(listener, "TCP_USER_TIMEOUT", math.ceil(client_timeout * 1000))


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine finds the socket's server."""
    host, port = listener.getsockname()[:2]
    host = str(_ALL_ADDRESSES.get(host, host))
    return f"http://[{host.replace('%', '%25')}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_everywhere(listener: socket.socket) -> bool:
    """Whether all addresses of this machine lead to the socket."""
    return listener.getsockname()[0] in _ALL_ADDRESSES


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
    """An application behind a socket, served on a thread from `start` to `stop`. Clients have `client_timeout` seconds
    for the headers of a request."""

    def __init__(self, app: ASGIApp, listener: socket.socket, client_timeout: float = CLIENT_SECONDS):
        self.url = url_of(listener)
        self._server = _Server(app, Crowd(client_timeout))
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

    def __init__(self, app: ASGIApp, crowd: Crowd):
        # h11 and asyncio are always there: the same server on every machine.
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", partial(Connection, crowd)),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                backlog=ACCEPTS_AT_ONCE,  # asyncio accepts as many before it does anything else
            )
        )
        self.settled = threading.Event()
        self._crowd = crowd

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._crowd.on_loop_error)
        self._crowd.measure()
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        self.settled.set()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            self._crowd.measure()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the main thread's."""
        yield


def _set_tcp(listener: socket.socket, name: str, value: int) -> None:
    with suppress(AttributeError, OSError):  # Linux has them all, others some
        listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
