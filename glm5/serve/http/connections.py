"""Limits on connections outside of requests: timeouts, a maximum number, and rejection of malformed HTTP.

    headers      must be complete within `seconds` of the accept, or of their first byte after a response; else 408
    rest of body of a request that was answered before its end: the same time, then the connection is closed
    idle         75 s after a response: longer than proxies keep connections for reuse

The number of connections is limited by the open files that the process may have. Beyond it, a new connection closes the
one that has waited longest for its client: first those without a request, then those with an unread response, then
those whose body is arriving. If all of them wait for the model, the new connection gets 503.

`glm5.serve.http.incoming` times bodies. The kernel times unread responses (`server.bind`).
"""

import asyncio
import errno
import json
import logging
import math
import re
import time
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Any, cast

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from glm5.common import open_files
from glm5.serve.http.errors import ApiError, envelope, error_response
from glm5.serve.http.limits import FULL_SECONDS

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16384  # even if more files may be open: each may buffer MAX_HEAD_BYTES
MAX_HEAD_BYTES = 32 * 2**10  # of a request line and headers, nginx' limit
ACCEPTS_AT_ONCE = 8
# Left for other open files, and for connections accepted before closed ones have freed theirs.
SPARE_FILES = 48
FEW_CONNECTIONS = 100  # fewer are worth a line at the start
IDLE_SECONDS = 75
BODY = "glm5.body"  # name of the extension of ASGI
LINGER_SECONDS = 2.0  # before closing on a client that still sends; else it would not read the error response
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Wait(Enum):
    """What a connection waits for its client to do. The lowest `rank` is closed first to make room."""

    REQUEST = "begin a request", 0
    HEADERS = "complete its headers", 0
    REST_OF_BODY = "complete the body of a request that was answered", 0
    ERROR_READ = "read the error response", 0
    RESPONSE_READ = "read its response", 1
    BODY = "send its body", 2

    def __init__(self, _: str, rank: int):
        self.rank = rank


class ThrottledLog:
    """Rate-limited warnings: at most one line per second and cause, with the number of those suppressed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}  # by cause: time of the last line, number suppressed since

    def warn(self, cause: str, text: str) -> None:
        now, (last, suppressed) = self._clock(), self._logged.get(cause, (-math.inf, 0))
        if now - last < 1:
            self._logged[cause] = last, suppressed + 1
            return
        self._logged[cause] = now, 0
        logger.warning("%s%s", text, f" ({suppressed} more since the last line)" if suppressed else "")


class ConnectionLimiter:
    """Limits the connections of a server, on the event loop's thread. `seconds`: for a client to send its headers."""

    def __init__(self, seconds: float, log: ThrottledLog | None = None):
        self.seconds, self.log = seconds, log or ThrottledLog()
        self.max_connections = MAX_CONNECTIONS
        self.outbox = Outbox()
        self._all: set[Connection] = set()
        # By rank of what they wait for; within a rank, the longest waiting first.
        self._waiting: tuple[dict[Connection, None], ...] = ({}, {}, {})

    def update_limit(self) -> None:
        """Derive the maximum number of connections from the files that are open now."""
        try:
            others = open_files.num_open() - len(self._all)
        except OSError:
            return
        self.max_connections = max(1, min(MAX_CONNECTIONS, open_files.limit() - others - SPARE_FILES))
        self._make_room(0)

    def warn_of_few(self) -> None:
        """Say so if there can be only few connections."""
        if self.max_connections < FEW_CONNECTIONS:
            most = "1 connection is" if self.max_connections == 1 else f"{self.max_connections} connections are"
            text = f"only {most} possible at the same time, as this process may have {open_files.limit()} open files"
            logger.warning("%s; raise the limit (ulimit -n), 4096 is enough for most servers", text)

    def enter(self, connection: "Connection") -> bool:
        """Add a connection, closing another if necessary. False if there is no room for it."""
        self._make_room(1)
        self._all.add(connection)
        has_room = len(self._all) <= self.max_connections
        if not has_room:
            self.log.warn("busy", f"all {self.max_connections} connections wait for responses: new ones get 503")
        return has_room

    def leave(self, connection: "Connection") -> None:
        self._all.discard(connection)
        self.set_wait(connection, None)

    def set_wait(self, connection: "Connection", wait: Wait | None) -> None:
        """Record what a connection waits for its client to do; None if the client waits for the server."""
        for waiting in self._waiting:
            waiting.pop(connection, None)
        if wait is not None and connection in self._all:
            self._waiting[wait.rank][connection] = None

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler. asyncio retries an accept that failed for lack of files after 1 s."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_FILES or "socket" not in context:
            loop.default_exception_handler(context)
            return
        text = f"no connection could be accepted: {error.strerror} (limit: {open_files.limit()})"
        self.log.warn("accept", f"{text}; raise the limit (ulimit -n)")
        self._close_waiting(ACCEPTS_AT_ONCE)

    def _make_room(self, wanted: int) -> None:
        for _ in range(self._close_waiting(len(self._all) + wanted - self.max_connections)):
            text = f"{self.max_connections} connections are allowed: those that wait longest for clients are closed"
            self.log.warn("limiter", text)

    def _close_waiting(self, number: int) -> int:
        """Close up to `number` connections that wait for their clients. Returns how many were closed."""
        for ended in range(number):
            victim = next((one for waiting in self._waiting for one in waiting), None)
            if victim is None:
                return ended
            self.leave(victim)
            victim.transport.abort()
        return max(0, number)


class Connection(H11Protocol):
    """uvicorn's connection with timeouts and a limit on their number. Malformed HTTP gets an error response."""

    def __init__(self, limiter: ConnectionLimiter, **given: Any):
        super().__init__(**given)
        self.limiter = limiter
        self.conn = _StrictHttp(self._refuse)
        self._wait: Wait | None = None
        self._deadline: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if not self.limiter.enter(self):
            self.app = _too_many_connections
        self._set_wait(Wait.HEADERS)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limiter.leave(self)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        # They refer to this connection: together they would stay until a garbage collection.
        self.cycle = self.scope = self.conn.refuse = cast("Any", None)

    def data_received(self, data: bytes) -> None:
        if self._wait is not Wait.ERROR_READ:
            super().data_received(data)

    def handle_events(self) -> None:
        cycle = self.cycle
        super().handle_events()
        if self.cycle is not cycle:  # a new request, whose task has not begun
            cast("dict[str, Any]", self.scope)["extensions"] = {BODY: Body(self)}
        if self in self.connections:  # not lost, nor that of a WebSocket now
            self._update_wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_wait()

    def shutdown(self) -> None:
        if self._wait is Wait.ERROR_READ:
            self.transport.close()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection: its client has exceeded the time for what it has to do."""
        if self.transport.is_closing():
            self.transport.abort()  # already closed, except that the client does not read
        elif self._wait is Wait.HEADERS and self.conn.has_partial_data:
            self._refuse(408, f"the headers were not complete after {self.limiter.seconds:g} s", "headers_timeout")
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        # HTTP allows a server to ignore an upgrade; uvicorn would log a warning.
        return self.ws_protocol_class is not None and self._get_upgrade() == b"websocket"

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Leave the connection to uvicorn's protocol for WebSockets. Its application limits sessions and their time."""
        self._set_wait(None)
        self.limiter.leave(self)
        super().handle_websocket_upgrade(event)
        protocol: Any = self.transport.get_protocol()
        if not protocol.handshake_initiated:  # a head that `websockets` refuses: uvicorn would leave the client waiting
            self.transport.abort()

    def _update_wait(self) -> None:
        """Update the timer and the limiter with what the connection waits for now."""
        if self._wait is Wait.ERROR_READ:
            return
        wait = self._waits_for()
        if wait is self._wait:
            self._set_timer()
        else:
            self._set_wait(wait)

    def _waits_for(self) -> Wait | None:
        if self.cycle and not self.cycle.response_complete:
            return Wait.RESPONSE_READ if self.flow.write_paused else Wait.BODY if self.cycle.more_body else None
        if self.conn.their_state is not h11.IDLE:
            return Wait.REST_OF_BODY
        return Wait.REQUEST if self.cycle and not self.conn.has_partial_data else Wait.HEADERS

    def _set_wait(self, wait: Wait | None) -> None:
        self._wait = wait
        self.limiter.set_wait(self, wait)
        seconds = {
            Wait.REQUEST: IDLE_SECONDS,
            Wait.HEADERS: self.limiter.seconds,
            Wait.REST_OF_BODY: self.limiter.seconds,
            Wait.ERROR_READ: LINGER_SECONDS,
        }
        self._deadline = None if wait not in seconds else self.loop.time() + seconds[wait]
        self._set_timer()

    def _set_timer(self) -> None:
        """Replaces uvicorn's keep-alive timer, which covers only the time between requests."""
        self._unset_keepalive_if_required()
        if self._deadline is not None:
            self.timeout_keep_alive_task = self.loop.call_at(self._deadline, self.timeout_keep_alive_handler)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Send an error response unless another has begun, and ignore what else the client sends."""
        # The log must not contain what the client sent: it may be part of a prompt, or an API key.
        self.limiter.log.warn(code, f"a connection was closed with {status} ({code})")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_answer(ApiError(status, message, code=code), self.server_state.default_headers))
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._set_wait(Wait.ERROR_READ)


class Outbox:
    """Parts of bodies, which wait for the end of the turn of the event loop and are then written one after the other:
    what makes parts and what sends them each find their code in the processor's caches (docs/log.md, 2026-11-26)."""

    def __init__(self) -> None:
        self._parts: list[tuple[Body, bytes]] = []

    def add(self, body: "Body", part: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self.flush)
        self._parts.append((body, part))

    def flush(self) -> None:
        """Write what waits. Clients that have left get nothing."""
        parts, self._parts = self._parts, []
        for body, part in parts:
            if not body.has_left:
                body.transport.write(part)


class Body:
    """Writes parts of a response's body to its connection: an extension of ASGI (`scope["extensions"][BODY]`).

    A part that goes through `send` passes every middleware and h11, which takes longer than all else that is done for
    a token. Middleware that reads or changes parts of bodies would not see those that are written here: there is none.
    Head and end of the response must go through `send`, after a `flush`.
    """

    __slots__ = ("_connection", "_flow", "_is_chunked", "_outbox", "transport")

    def __init__(self, connection: Connection):
        # Not its cycle, whose scope holds this: each request would leave garbage that only the collector finds.
        self._connection, self.transport, self._flow = connection, connection.transport, connection.flow
        self._is_chunked = connection.conn.their_http_version == b"1.1"
        self._outbox = connection.limiter.outbox

    @property
    def has_left(self) -> bool:
        """Whether the client is gone. Between head and end of the response, as for all of these."""
        cycle: Any = self._connection.cycle
        return cycle is None or cycle.disconnected

    @property
    def is_open(self) -> bool:
        """Whether the client can be written to at once: it is there, and reads what it gets."""
        return not (self._flow.write_paused or self.has_left)

    def write(self, part: bytes) -> None:
        """Only if it `is_open`, and between head and end."""
        self._outbox.add(self, b"%x\r\n%b\r\n" % (len(part), part) if self._is_chunked else part)

    def flush(self) -> None:
        """Send what was written, of all bodies."""
        self._outbox.flush()


class _StrictHttp(h11.Connection):
    """h11 that reports malformed input to `refuse` instead of raising, and refuses ambiguous requests."""

    def __init__(self, refuse: Callable[[int, str, str], None]):
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.refuse, self._head = refuse, b""

    @property
    def has_partial_data(self) -> bool:
        """Whether an incomplete message has been received."""
        return bool(self.trailing_data[0])

    def send(self, event: Any) -> Any:  # bytes, or None after `ConnectionClosed`
        """The bytes of an event. The head of a response of known length goes with its body, in one call of the
        kernel."""
        output = super().send(event)
        if isinstance(event, h11.Response) and any(name == b"content-length" for name, _ in event.headers):
            self._head = output or b""
            return b""
        head, self._head = self._head, b""
        return head + output if head and output is not None else output

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self.refuse(431, f"a part of the head is longer than {MAX_HEAD_BYTES} bytes", "headers_too_large")
            else:
                self.refuse(400, f"this is not a request in HTTP/1.1: {_words_of(error)}", "bad_http")
            return h11.NEED_DATA
        if isinstance(event, h11.Request) and (fault := _fault_of(event)):
            self.refuse(*fault)
            return h11.NEED_DATA
        return event


def _words_of(error: h11.RemoteProtocolError) -> str:
    """h11's message, without the bytes that some end with, as Python writes them."""
    return re.split(r": (?:bytearray\()?b['\"]", str(error), maxsplit=1)[0]


def _fault_of(request: h11.Request) -> tuple[int, str, str] | None:
    """Status, message and code of the refusal; None for a valid request."""
    names = {name for name, _ in request.headers}
    if not request.http_version.startswith(b"1."):
        return 505, "this server supports only HTTP/1.0 and HTTP/1.1", "http_version"
    if b"transfer-encoding" in names and b"content-length" in names:
        return 400, "the request has Content-Length and Transfer-Encoding; allowed: one of them", "bad_http"
    # h11 checks its limit only for headers that arrive in several parts.
    num_bytes = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
    if num_bytes > MAX_HEAD_BYTES:
        return 431, f"the headers have {num_bytes} bytes; allowed: {MAX_HEAD_BYTES}", "headers_too_large"
    return None


def _answer(error: ApiError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The bytes of an error response. h11 cannot write one for a request that it could not parse."""
    body = json.dumps(envelope(error)).encode()
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in [*headers, *own]]
    return b"\r\n".join([*lines, b"", body])


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application of a connection that was accepted beyond the limit."""
    message = "the server has reached its limit of connections; try again later"
    error = ApiError(503, message, code="too_many_connections", retry_after=FULL_SECONDS)
    response = error_response(error, scope["path"])
    response.headers["Connection"] = "close"
    await response(scope, receive, send)
