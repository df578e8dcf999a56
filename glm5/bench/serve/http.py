"""A minimal HTTP/1.1 client for one server, to keep the load generator's own CPU time small.

Bodies are passed on inside `data_received` with their arrival time, so that measured times do not include the
scheduling of tasks. Connections are reused; one that the server closed while it was idle is replaced. Times are of the
event loop's clock, which tests replace.

Bodies may have a content length, be chunked, or end with the connection. Redirects and compression are not supported,
because both would distort the measurement.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from glm5.bench.serve.failure import BAD_ANSWER, CONNECT, DISCONNECTED, RequestFailed
from glm5.common.errors import ConfigError

MAX_HEAD = 65536  # bytes of a status line with its headers, and of the line that starts a chunk
NO_BODY = (204, 304)

Receive = Callable[["Answer", bytes, float], None]
"""Receives a piece of a body and its arrival time."""


@dataclass
class Answer:
    """The head of a response; `complete` once its body has ended."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    complete: bool = False


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: "Callable[[Connection], None]") -> None:
        self._loop = loop
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._answer = Answer()
        self._receive: Receive | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._read: Callable[[bytes, int, float], int | None] = self._read_head
        self._remaining = 0
        self._keep_alive = False
        self.answered = False

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, receive: Receive) -> "asyncio.Future[Answer]":
        """Write a request. The future's result is the response, its exception `RequestFailed`."""
        assert self._done is None, "one request at a time"
        done = self._done = self._loop.create_future()
        self._answer, self._receive, self._read = Answer(), receive, self._read_head
        self.answered = False
        if self._transport is None:  # lost after the pool returned it
            self._fail(DISCONNECTED, "the server closed the connection")
        else:
            self._transport.write(request)
        return done

    def abort(self) -> None:
        """Close immediately."""
        self._receive = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is not None:
            if self._read == self._read_to_end:
                self._finish()
            else:
                self._fail(DISCONNECTED, str(exc or "the server closed the connection"))
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        at = 0
        try:
            while self._done is not None and at < len(data):
                end = self._read(data, at, now)
                if end is None:
                    self._buffer = data[at:]
                    return
                at = end
        except RequestFailed as error:  # raised by the receiver of the body
            self._fail(error.kind, error.message)
            self.abort()
            return
        except ValueError as error:
            self._fail(BAD_ANSWER, f"not HTTP/1.1 ({error})")
            self.abort()
            return
        if at < len(data):  # data without a request
            self.abort()

    def _read_head(self, data: bytes, at: int, now: float) -> int | None:
        self.answered = True
        stop = data.find(b"\r\n\r\n", at)
        if stop < 0:
            _check_size(len(data) - at)
            return None
        first, *lines = data[at:stop].decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ", 2)
        if not version.startswith("HTTP/1."):
            raise ValueError(f"it begins {first[:40]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._answer.status, self._answer.headers = int(status), headers
        if 100 <= self._answer.status < 200:  # an interim answer; the real one follows
            return stop + 4
        connection = headers.get("connection", "").lower()
        self._keep_alive = "close" not in connection if version == "HTTP/1.1" else "keep-alive" in connection
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._read = self._read_chunk
        elif self._answer.status in NO_BODY or "content-length" in headers:
            self._remaining = 0 if self._answer.status in NO_BODY else int(headers["content-length"])
            self._read = self._read_length
            if self._remaining == 0:
                self._finish()
        else:
            self._keep_alive, self._read = False, self._read_to_end
        return stop + 4

    def _read_chunk(self, data: bytes, at: int, now: float) -> int | None:
        """Passes on complete chunks only: an event is useful only with its end."""
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            _check_size(len(data) - at)
            return None
        size = int(data[at:line_end].partition(b";")[0], 16)
        start = line_end + 2
        if size < 0:
            raise ValueError("a chunk of negative size")
        if size == 0:
            return self._read_trailers(data, start)
        if len(data) < start + size + 2:
            return None
        self._pass_on(data[start : start + size], now)
        return start + size + 2

    def _read_trailers(self, data: bytes, start: int) -> int | None:
        end = start if data.startswith(b"\r\n", start) else data.find(b"\r\n\r\n", start) + 2
        if end < start:
            _check_size(len(data) - start)
            return None
        self._finish()
        return end + 2

    def _read_length(self, data: bytes, at: int, now: float) -> int:
        piece = data[at : at + self._remaining]
        self._remaining -= len(piece)
        self._pass_on(piece, now)
        if self._remaining == 0:
            self._finish()
        return at + len(piece)

    def _read_to_end(self, data: bytes, at: int, now: float) -> int:
        self._pass_on(data[at:], now)
        return len(data)

    def _pass_on(self, piece: bytes, now: float) -> None:
        if self._receive is not None:
            self._receive(self._answer, piece, now)

    def _finish(self) -> None:
        done, self._done, self._receive = self._done, None, None
        self._answer.complete = True
        if not self._keep_alive and self._transport is not None:
            self._transport.close()
        if done is not None and not done.done():
            done.set_result(self._answer)

    def _fail(self, kind: str, message: str) -> None:
        done, self._done, self._receive = self._done, None, None
        if done is not None and not done.done():
            done.set_exception(RequestFailed(kind, message))


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_HEAD:
        raise ValueError(f"a head of more than {MAX_HEAD} bytes")


Open = Callable[[Callable[[], Connection]], Awaitable[Connection]]
"""Opens a connection for the protocol that the factory makes."""


class Pool:
    """Connections to one server, one for each running request."""

    def __init__(self, open_connection: Open) -> None:
        self._open_connection = open_connection
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self.num_opened = 0

    async def send(self, request: bytes, receive: Receive) -> Answer:
        """The response's head, after its body went to `receive`. Raises `RequestFailed`; cancelling closes the
        socket."""
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._open()
            try:
                answer = await connection.send(request, receive)
            except RequestFailed as error:
                # A server may close an idle connection at any time; that is not an error of this request.
                if reused and not connection.answered and error.kind == DISCONNECTED:
                    continue
                raise
            except asyncio.CancelledError:
                connection.abort()
                raise
            if connection.usable:
                self._idle.append(connection)
            return answer

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._all):
            connection.abort()

    async def _open(self) -> Connection:
        try:
            connection = await self._open_connection(lambda: Connection(self._loop, self._forget))
        except OSError as error:
            raise RequestFailed(CONNECT, error.strerror or str(error)) from None
        self._all.add(connection)
        self.num_opened += 1
        return connection

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)


@dataclass(frozen=True)
class Address:
    """The address of a server. `path` is the prefix of every route."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def of(cls, url: str) -> "Address":
        """Parse a URL. Raises ConfigError if it is not http or https."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address; allowed: http://HOST:PORT or https://HOST")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def route(self, path: str) -> str:
        """`path` on this server. If the base URL ends in /v1, as for OpenAI's clients, /v1 is not repeated."""
        if self.path.endswith("/v1"):
            return self.path + path.removeprefix("/v1") if path.startswith("/v1/") else self.path[:-3] + path
        return self.path + path

    def request(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
        """The bytes of a request."""
        lines = [f"{method} {self.route(path)} HTTP/1.1", f"Host: {self.host_header}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def opener(address: Address, *, verify: bool = True) -> Open:
    """A function that opens connections to `address`. The host name is resolved once, here. Raises `RequestFailed`."""
    loop = asyncio.get_running_loop()
    context = _tls_context(verify=verify) if address.tls else None
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=1)
    except OSError as error:
        raise RequestFailed(CONNECT, f"{address.host}: {error.strerror or error}") from None
    hosts = list(dict.fromkeys(str(info[4][0]) for info in found))

    async def open_connection(factory: Callable[[], Connection]) -> Connection:
        failure: OSError | None = None
        for host in list(hosts):
            try:
                _, connection = await loop.create_connection(
                    factory, host, address.port, ssl=context, server_hostname=address.host if context else None
                )
                return connection
            except OSError as error:
                failure = error
                hosts.append(hosts.pop(hosts.index(host)))  # the next connection tries this one last
        raise failure or OSError("no address")

    return open_connection


def _tls_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
