"""Server-sent events: a stream of events that is kept alive while none arrive.

    return await EventStream.begun(events, failed=...)

An error before the first event is raised as an exception, and so gets a response with its own status: requests that the
engine refuses get 400 here too. If the first event is late, the status line is sent before it; an error after the
status line is sent as the last event.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from json.encoder import encode_basestring_ascii
from time import monotonic
from typing import Any, Generic, Self, TypeVar

from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from glm5.serve.http.connections import BODY, Body
from glm5.serve.http.errors import ApiError, to_api_error

logger = logging.getLogger(__name__)

PING_SECONDS = 10.0  # proxies commonly give up after 30 or 60
COMMENT = ": ping\n\n"  # clients skip it
EMPTY_LINE = "\n"  # ends an empty event, which clients ignore
# Hand-written clients such as SGLang's load generator parse every line as JSON except an empty one.
_READS_LINES = ("aiohttp", "python-requests", "python-urllib")
DONE = "data: [DONE]\n\n"


def event(content: Mapping[str, Any], name: str | None = None) -> str:
    """One event, escaped to ASCII: arguments may contain a lone surrogate, which UTF-8 cannot encode."""
    data = f"data: {json.dumps(content)}\n\n"
    return data if name is None else f"event: {name}\n{data}"


SPACE = "\0glm5\0"  # a text that no answer has, in an event that `Spaced` fills


class Spaced:
    """An event that differs from others only in one text: serialized once, with SPACE for the text."""

    def __init__(self, event: str) -> None:
        self._parts = event.split(json.dumps(SPACE))

    def filled(self, text: str) -> str:
        """The event with this text."""
        return encode_basestring_ascii(text).join(self._parts)


def keep_alive_for(user_agent: str) -> str:
    """The keep-alive text that this client can read."""
    return EMPTY_LINE if any(name in user_agent.lower() for name in _READS_LINES) else COMMENT


T = TypeVar("T")


PlainEvents = dict[tuple[int, type[Any]], Spaced]
"""By the index of an answer and the type of a part of it: the event of such a part, in which only the text differs."""


class Tap(Generic[T]):
    """Sends parts of a stream past the generator of its events: see `EventStream`. `write` gives a part's events;
    those in `plain`, which may grow, can be sent without it."""

    __slots__ = ("_write", "out", "plain")

    def __init__(self, write: Callable[[T], str], plain: PlainEvents | None = None) -> None:
        self._write, self.plain = write, {} if plain is None else plain
        self.out: _Out | None = None

    @property
    def is_open(self) -> bool:
        return self.out is not None and self.out.is_open

    def send(self, part: T) -> None:
        """Only if it `is_open`, while the generator waits."""
        if text := self._write(part):
            self.send_text(text)

    def send_text(self, text: str) -> None:
        """The same for what is written already."""
        assert self.out is not None
        self.out.write_now(text.encode())


class EventStream(StreamingResponse):
    """A response that sends complete events. `failed` formats an error as the end of the stream. `ping` is sent when
    nothing else was for a while: by default a comment, or an empty line to clients that cannot read comments. `events`
    is closed however the response ends.

    With a `tap`, parts are also sent without a switch to the stream's task: while the generator waits for the next one,
    everything before has been sent. The tap opens after the first event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        *,
        failed: Callable[[ApiError], str],
        ping: str | None = None,
        tap: Tap[Any] | None = None,
    ) -> None:
        self._events, self._failed, self._ping, self._tap = events, failed, ping, tap
        self._first: asyncio.Task[str | None] | None = None
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    @classmethod
    async def begun(
        cls,
        events: AsyncGenerator[str, None],
        *,
        failed: Callable[[ApiError], str],
        ping: str | None = None,
        tap: Tap[Any] | None = None,
    ) -> Self:
        """A stream whose first event has arrived, or is late. Raises an exception that arrives instead of it."""
        stream = cls(events, failed=failed, ping=ping, tap=tap)
        first = stream._first = asyncio.ensure_future(_next(events))
        try:
            await asyncio.wait({first}, timeout=PING_SECONDS)
            if first.done():
                first.result()
        except BaseException:
            await stream._close()
            raise
        return stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _Out(send, scope.get("extensions", {}).get(BODY))
        ping = self._ping or keep_alive_for(Headers(scope=scope).get("user-agent", ""))
        pinger: asyncio.Task[None] | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pinger = asyncio.create_task(out.keep_alive(ping.encode()))
            try:
                if self._first is not None and (event := await self._first) is not None:
                    await out.write(event.encode())
                if self._tap is not None:
                    self._tap.out = out
                async for event in self._events:
                    if out.is_open:
                        out.write_now(event.encode())
                    else:
                        await out.write(event.encode())
            except Exception as error:  # noqa: BLE001 - logged, and told to the client
                await out.write(self._end_of(error).encode())
            pinger.cancel()
            out.flush()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._tap is not None:
                self._tap.out = None
            if pinger is not None:
                pinger.cancel()
            await self._close()

    def _end_of(self, error: Exception) -> str:
        """The last event of a stream that fails."""
        api_error = to_api_error(error)
        if api_error.code == "internal_error":
            logger.error("internal error in a stream", exc_info=error)
        else:
            logger.warning("%s", api_error.message)
        return self._failed(api_error)

    async def _close(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait({self._first})
        await self._events.aclose()


class _Out:
    """Sends parts of a body, past the middleware if the server offers it. A client that does not read is waited for."""

    __slots__ = ("_body", "_send", "_sending", "last_sent")

    def __init__(self, send: Send, body: Body | None) -> None:
        self._send, self._body = send, body
        self._sending = asyncio.Lock()
        self.last_sent = monotonic()

    @property
    def is_open(self) -> bool:
        """Whether a part can be written without waiting."""
        return self._body is not None and self._body.is_open

    def write_now(self, part: bytes) -> None:
        assert self._body is not None
        self._body.write(part)
        self.last_sent = monotonic()

    def flush(self) -> None:
        """Before anything that `_send` sends, what was written must be sent."""
        if self._body is not None:
            self._body.flush()

    async def write(self, part: bytes) -> None:
        async with self._sending:
            self.flush()
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            self.last_sent = monotonic()

    async def keep_alive(self, ping: bytes) -> None:
        """Send pings for ever, each after a time without other parts."""
        while True:
            await asyncio.sleep(max(0.0, self.last_sent + PING_SECONDS - monotonic()))
            if monotonic() >= self.last_sent + PING_SECONDS:
                await self.write(ping)


async def _next(events: AsyncGenerator[str, None]) -> str | None:
    return await anext(events, None)
