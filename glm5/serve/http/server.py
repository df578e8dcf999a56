"""The HTTP server, on its own thread: the main thread loads the model, handles signals and decides when to stop.

The socket listens before the model is loaded. Until then, `AppWhenReady` answers every request with 503.
"""

import asyncio
import errno
import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from glm5.serve.http.connections import ACCEPTS_AT_ONCE, Connection, ConnectionLimiter
from glm5.serve.http.errors import ApiError, error_response
from glm5.serve.service.service import Engine
from glm5.serve.service.state import ServerState

# How long a shutdown waits for clients that do not read the end of their response.
CLOSE_SECONDS = 3.0
# Default time for a client to send the headers of a request.
CLIENT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_BACKLOG = 2048  # connections that the kernel queues until they are accepted
_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard address: the address to connect to
_HINTS = {
    errno.EADDRINUSE: "; choose another --port, or 0 for a free one",
    errno.EACCES: "; ports from 1024 on are open to all",
    errno.EADDRNOTAVAIL: "; allowed: an address of this machine, or 0.0.0.0 for all",
}
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


def bind(host: str, port: int, client_timeout: float | None = None) -> socket.socket:
    """A socket that listens at this address (port 0: a free one). Raises OSError naming the address.

    The kernel closes connections whose client has vanished after two minutes, and those whose client does not read
    what was sent after `client_timeout` seconds.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        # asyncio sets TCP_NODELAY only on sockets of this protocol; without it every response comes 40 ms late.
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
    except ValueError:  # a text that cannot be a host name
        raise _cannot_listen(host, port, "this is neither an address nor a name") from None
    return listener


def _cannot_listen(host: str, port: int, why: str) -> OSError:
    return OSError(f"cannot listen on {host:.80} port {port}: {why}")


def _prepare(listener: socket.socket, client_timeout: float | None) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit these options.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        _set_tcp(listener, name, value)
    if client_timeout is not None:
        _set_tcp(listener, "TCP_USER_TIMEOUT", math.ceil(client_timeout * 1000))


def url_of(listener: socket.socket) -> str:
    """The URL under which a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    host = str(_ALL_ADDRESSES.get(host, host))
    return f"http://[{host.replace('%', '%25')}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_everywhere(listener: socket.socket) -> bool:
    """Whether the socket listens on all addresses of this machine."""
    return listener.getsockname()[0] in _ALL_ADDRESSES


class AppWhenReady:
    """ASGI: forwards to `app` once it is set; until then answers every request with 503, /health too."""

    def __init__(self, state: ServerState):
        self.app: ASGIApp | None = None
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            message = "this process of the server has just been started; try again in a moment"
            if (reason := self.state.not_serving) is not None:
                message = f"the model does not answer yet: {reason}"
            error = ApiError(503, message, code="starting", retry_after=5)
            await error_response(error, scope["path"])(scope, receive, send)


class Server:
    """Serves an application on a thread from `start` to `stop`. Clients have `client_timeout` seconds to send the
    headers of a request. `max_message`: bytes of a message of a WebSocket; 0: there are none."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, client_timeout: float = CLIENT_SECONDS, max_message: int = 0
    ):
        self.url = url_of(listener)
        self._server = _Server(app, ConnectionLimiter(client_timeout), max_message)
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="glm5-server", daemon=True)

    @property
    def ended_because(self) -> str | None:
        """None while it serves."""
        return None if self._thread.is_alive() else "its thread has failed; the lines above say why"

    def start(self) -> None:
        """Start the thread and wait until it listens. Raises RuntimeError if it cannot."""
        self._thread.start()
        self._server.settled.wait()
        if not self._server.started:
            raise RuntimeError("the server did not start; see its log for the reason")

    async def end_listening(self) -> None:
        """Accept no more connections; those that are open stay. On the event loop that serves."""
        await self._server.end_listening()

    def stop_listening(self) -> None:
        """As `end_listening`, on any other thread."""
        if self._thread.is_alive() and self._server.loop is not None:
            ended = asyncio.run_coroutine_threadsafe(self.end_listening(), self._server.loop)
            wait([ended], CLOSE_SECONDS)

    def begin_stop(self, seconds: float) -> None:
        """Accept no more connections and close the open ones. Running responses get so many seconds."""
        self._server.config.timeout_graceful_shutdown = max(1, round(seconds))
        self._server.should_exit = True

    def stop(self, seconds: float = CLOSE_SECONDS, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """As `begin_stop`, and wait for the end. It comes at once when `is_urgent` is true."""
        self.begin_stop(seconds)
        while self._thread.is_alive() and not is_urgent():
            self._thread.join(_POLL_SECONDS)
        self._server.force_exit = True
        self._thread.join(CLOSE_SECONDS)

    async def serve(self) -> None:
        """Serve on the calling event loop until `begin_stop`, instead of on a thread."""
        await self._server.serve([self._listener])

    def _run(self) -> None:
        try:
            asyncio.run(self.serve())
        finally:
            self._server.settled.set()


@contextmanager
def serving(app: ASGIApp, engine: Engine, listener: socket.socket) -> Iterator[str]:
    """Serve while the block runs; yields the URL. Closes engine and socket at the end."""
    server = Server(app, listener)
    server.start()
    try:
        yield server.url
    finally:
        engine.close()
        server.stop()


class _Server(uvicorn.Server):
    """Logs to the handlers that the command line set up. `settled` is set once it listens or has failed to."""

    def __init__(self, app: ASGIApp, limiter: ConnectionLimiter, max_message: int):
        # h11 and asyncio rather than optional packages, so that every machine runs the same server.
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", partial(Connection, limiter)),
                loop="asyncio",
                ws="websockets-sansio" if max_message else "none",
                ws_max_size=max_message,
                ws_ping_interval=None,  # the kernel notices a client that has vanished
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                backlog=ACCEPTS_AT_ONCE,  # connections that asyncio accepts in one turn of its loop
            )
        )
        self.settled = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._limiter = limiter
        self._listeners: list[socket.socket] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop, self._listeners = asyncio.get_running_loop(), sockets or []
        self.loop.set_exception_handler(self._limiter.on_loop_error)
        self._limiter.update_limit()
        self._limiter.warn_of_few()
        await super().startup(sockets)
        for listener in self._listeners:
            listener.listen(_BACKLOG)
        self.settled.set()

    async def end_listening(self) -> None:
        """Close the listening sockets, and serve the connections that the kernel has queued for them: it would reset
        them."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
        await asyncio.sleep(0)  # asyncio drops connections that it has accepted and not yet set up
        queued = [connection for listener in self._listeners for connection in _accept_all(listener)]
        for server in self.servers:
            server.close()
        self._listeners = []
        for connection in queued:
            given = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
            await loop.connect_accepted_socket(partial(self.config.http_protocol_class, **given), connection)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            self._limiter.update_limit()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the main thread handles signals."""
        yield


def _accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections that wait to be accepted."""
    with suppress(OSError):  # none is left, or no file for one
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)  # noqa: FBT003 - the standard library's
            yield connection


def _set_tcp(listener: socket.socket, name: str, value: int) -> None:
    with suppress(AttributeError, OSError):  # Linux has all of these options, other systems only some
        listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
