"""Connections before and between requests: how long, how many, and what is no HTTP.

    headers      whole within `seconds` of the accept, or of their first byte after an answer: else 408, or the end
    a rest       of a body that was answered before it was whole: the same
    nothing      after an answer: 75 s, longer than proxies keep a connection that they may use again

There are at most as many connections as the process may have open files. One more ends the connection that has waited
longest for its client: one that sends no request before one that leaves its answer unread, and that before one whose
body is coming. Where all of them wait for the model, the new one is told so (503).

Bodies are timed in `glm5.serve.http.incoming`; what is sent and left unread, by the kernel (`server.bind`).
"""

import asyncio
import errno
import json
import logging
import math
import time
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from glm5.common import open_files
from glm5.serve.http.errors import ApiError, envelope, error_response
from glm5.serve.http.limits import FULL_SECONDS

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16384  # whatever may be open: each may hold MAX_HEAD_BYTES
MAX_HEAD_BYTES = 32 * 2**10  # of a request line and headers, as nginx has it
ACCEPTS_AT_ONCE = 8
# What is accepted before the ends of others have taken effect, a few rounds of ACCEPTS_AT_ONCE; files of the moment.
SPARE_FILES = 48
IDLE_SECONDS = 75
LINGER_SECONDS = 2.0  # for a client that still sends: closed at once, it would never read why
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Wait(Enum):
    """What a connection waits for its client to do. Of the connections that have to end for others, `rank` 0 goes
    first."""

    BEGIN = "begin a request", 0
    HEAD = "end its headers", 0
    REST = "end the body of a request that is answered", 0
    OVER = "read why it was refused", 0
    READ = "read its answer", 1
    BODY = "send its body", 2

    def __init__(self, _: str, rank: int):
        self.rank = rank


class Seldom:
    """Warnings that may have thousands of occasions: one line a second for one cause, with the number of the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # by cause: when, and how many occasions since

    def warn(self, cause: str, text: str) -> None:
        now, (last, unsaid) = self._clock(), self._said.get(cause, (-math.inf, 0))
        if now - last < 1:
            self._said[cause] = last, unsaid + 1
            return
        self._said[cause] = now, 0
        logger.warning("%s%s", text, f" ({unsaid} more since the last line)" if unsaid else "")


class Crowd:
    """All connections of a server, on the event loop's thread. `seconds` is what a client has for its headers."""

    def __init__(self, seconds: float, seldom: Seldom | None = None):
        self.seconds, self.seldom = seconds, seldom or Seldom()
        self.most = MAX_CONNECTIONS
        self._all: set[Connection] = set()
        # By the rank of what they wait for, each in the order in which they began to.
        self._waiting: tuple[dict[Connection, None], ...] = ({}, {}, {})

    def measure(self) -> None:
        """How many connections there may be, by the files that are open now."""
        try:
            others = open_files.num_open() - len(self._all)
        except OSError:
            return
        self.most = max(1, min(MAX_CONNECTIONS, open_files.limit() - others - SPARE_FILES))
        self._make_room(0)

    def enter(self, connection: "Connection") -> bool:
        """Whether there is room for this one, or room could be made."""
        self._make_room(1)
        self._all.add(connection)
        has_room = len(self._all) <= self.most
        if not has_room:
            self.seldom.warn("busy", f"there are {self.most} connections, and all wait for answers: others get 503")
        return has_room

    def leave(self, connection: "Connection") -> None:
        self._all.discard(connection)
        self.note(connection, None)

    def note(self, connection: "Connection", wait: Wait | None) -> None:
        """It waits for its client from now on; or, with None, its client for it."""
        for waiting in self._waiting:
            waiting.pop(connection, None)
        if wait is not None and connection in self._all:
            self._waiting[wait.rank][connection] = None

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio's word on what nobody handles: it cannot accept where all files are taken, and tries again in 1 s."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_FILES or "socket" not in context:
            loop.default_exception_handler(context)
            return
        text = f"no connection could be accepted: {error.strerror}, of {open_files.limit()} that may be open"
        self.seldom.warn("accept", f"{text}; raise the limit (ulimit -n)")
        self._end(ACCEPTS_AT_ONCE)

    def _make_room(self, wanted: int) -> None:
        for _ in range(self._end(len(self._all) + wanted - self.most)):
            text = f"there may be {self.most} connections: those that have waited longest for their clients are ended"
            self.seldom.warn("crowd", text)

    def _end(self, number: int) -> int:
        """So many connections that wait for their clients, or as many as there are. How many that were."""
        for ended in range(number):
            victim = next((one for waiting in self._waiting for one in waiting), None)
            if victim is None:
                return ended
            self.leave(victim)
            victim.transport.abort()
        return max(0, number)


class Connection(H11Protocol):
    """uvicorn's connection, timed and counted. What is no HTTP is answered with a reason."""

    def __init__(self, crowd: Crowd, **given: Any):
        super().__init__(**given)
        self.crowd = crowd
        self.conn = _Wire(self._refuse)
        self._wait: Wait | None = None
        self._deadline: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if not self.crowd.enter(self):
            self.app = _crowded
        self._begin(Wait.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._wait is not Wait.OVER:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note()

    def shutdown(self) -> None:
        if self._wait is Wait.OVER:
            self.transport.close()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """The client's time is up."""
        if self.transport.is_closing():
            self.transport.abort()  # it only waits for a client that does not read
        elif self._wait is Wait.HEAD and self.conn.has_some:
            self._refuse(408, f"the headers were not whole after {self.crowd.seconds:g} s", "headers_timeout")
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # an upgrade is an offer: it is answered as if there were none, and not worth a warning

    def _note(self) -> None:
        """Time and count it by what it waits for now."""
        if self._wait is Wait.OVER:
            return
        wait = self._waits_for()
        if wait is self._wait:
            self._set_timer()
        else:
            self._begin(wait)

    def _waits_for(self) -> Wait | None:
        if self.cycle and not self.cycle.response_complete:
            return Wait.READ if self.flow.write_paused else Wait.BODY if self.cycle.more_body else None
        if self.conn.their_state is not h11.IDLE:
            return Wait.REST
        return Wait.BEGIN if self.cycle and not self.conn.has_some else Wait.HEAD

    def _begin(self, wait: Wait | None) -> None:
        self._wait = wait
        self.crowd.note(self, wait)
        seconds = {
            Wait.BEGIN: IDLE_SECONDS,
            Wait.HEAD: self.crowd.seconds,
            Wait.REST: self.crowd.seconds,
            Wait.OVER: LINGER_SECONDS,
        }
        self._deadline = None if wait not in seconds else self.loop.time() + seconds[wait]
        self._set_timer()

    def _set_timer(self) -> None:
        """In the place of uvicorn's own, which knows of no wait but the one between requests."""
        self._unset_keepalive_if_required()
        if self._deadline is not None:
            self.timeout_keep_alive_task = self.loop.call_at(self._deadline, self.timeout_keep_alive_handler)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Say why, where no answer has begun, and read no more."""
        # Nothing that the client sent: it may be part of a prompt, or a key.
        self.crowd.seldom.warn(code, f"a connection was ended, with {status} ({code})")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_answer(ApiError(status, message, code=code), self.server_state.default_headers))
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._begin(Wait.OVER)


class _Wire(h11.Connection):
    """Tells of what it cannot read, where h11 raises; and refuses what two servers could read in two ways."""

    def __init__(self, refuse: Callable[[int, str, str], None]):
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._refuse = refuse

    @property
    def has_some(self) -> bool:
        """Whether something has come that is not whole."""
        return bool(self.trailing_data[0])

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self._refuse(431, f"a part of this request is longer than {MAX_HEAD_BYTES} bytes", "headers_too_large")
            else:
                self._refuse(400, f"this is no request in HTTP/1.1: {error}", "bad_http")
            return h11.NEED_DATA
        if isinstance(event, h11.Request) and (fault := _fault_of(event)):
            self._refuse(*fault)
            return h11.NEED_DATA
        return event


def _fault_of(request: h11.Request) -> tuple[int, str, str] | None:
    """Status, message and code."""
    names = {name for name, _ in request.headers}
    if not request.http_version.startswith(b"1."):
        return 505, "this server speaks HTTP/1.1", "http_version"
    if b"transfer-encoding" in names and b"content-length" in names:
        return 400, "Content-Length beside Transfer-Encoding; allowed: one of them", "bad_http"
    # h11 counts them only where they come in pieces.
    num_bytes = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
    if num_bytes > MAX_HEAD_BYTES:
        return 431, f"the headers have {num_bytes} bytes; allowed: {MAX_HEAD_BYTES}", "headers_too_large"
    return None


def _answer(error: ApiError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """All of it, as it goes out: what h11 would write for a request that it has not understood is not defined."""
    body = json.dumps(envelope(error)).encode()
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in [*headers, *own]]
    return b"\r\n".join([*lines, b"", body])


async def _crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """For a connection that came when all others were waiting for the model."""
    message = "the server has as many connections as it may have, and all of them wait for answers; try again later"
    error = ApiError(503, message, code="too_many_connections", retry_after=FULL_SECONDS)
    response = error_response(error, scope["path"])
    response.headers["Connection"] = "close"
    await response(scope, receive, send)
