"""Server-sent events: an answer as it is written, kept alive while nothing comes.

    return await EventStream.begun(events, failed=...)

What goes wrong before the first event is an exception, and so an answer with a status of its own: requests that the
engine refuses are 400 here too. Only when nothing has come for a while is the status line sent before the first event;
an error after it is the last event.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Self

from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from glm5.serve.http.errors import ApiError, to_api_error

logger = logging.getLogger(__name__)

PING_SECONDS = 10.0  # proxies commonly give up after 30 or 60
COMMENT = ": ping\n\n"  # which clients skip
EMPTY_LINE = "\n"  # an event of nothing, which is none
# Line readers that people write by hand, SGLang's load generator among them: they take every line for JSON but this.
_READS_LINES = ("aiohttp", "python-requests", "python-urllib")
DONE = "data: [DONE]\n\n"


def event(content: Mapping[str, Any], name: str | None = None) -> str:
    """One event, escaped to ASCII: arguments may hold half a surrogate pair, which has no UTF-8 form."""
    data = f"data: {json.dumps(content)}\n\n"
    return data if name is None else f"event: {name}\n{data}"


def keep_alive_for(user_agent: str) -> str:
    """What keeps a stream alive that this client reads."""
    return EMPTY_LINE if any(name in user_agent.lower() for name in _READS_LINES) else COMMENT


class EventStream(StreamingResponse):
    """Events, each a whole one as it is sent. `failed` writes an error as the end of the stream. `ping` is sent when
    nothing else was for a while: by default a comment, or an empty line to clients that read no comments. However the
    response ends, `events` is closed."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], *, failed: Callable[[ApiError], str], ping: str | None = None
    ) -> None:
        self._events, self._failed, self._ping = events, failed, ping
        self._first: asyncio.Task[str | None] | None = None
        super().__init__(self._told(), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    @classmethod
    async def begun(
        cls, events: AsyncGenerator[str, None], *, failed: Callable[[ApiError], str], ping: str | None = None
    ) -> Self:
        """A stream whose first event is there, or late. Raises what came instead of it."""
        stream = cls(events, failed=failed, ping=ping)
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
        loop, sending = asyncio.get_running_loop(), asyncio.Lock()
        ping = self._ping or keep_alive_for(Headers(scope=scope).get("user-agent", ""))
        last_sent = loop.time()

        async def send_one(message: Any) -> None:
            nonlocal last_sent
            async with sending:
                await send(message)
                last_sent = loop.time()

        async def keep_alive() -> None:
            message = {"type": "http.response.body", "body": ping.encode(), "more_body": True}
            while True:
                await asyncio.sleep(max(0.0, last_sent + PING_SECONDS - loop.time()))
                if loop.time() >= last_sent + PING_SECONDS and not sending.locked():
                    await send_one(message)

        pinger: asyncio.Task[None] | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pinger = asyncio.create_task(keep_alive())
            async for event in self.body_iterator:
                body = event.encode() if isinstance(event, str) else bytes(event)
                await send_one({"type": "http.response.body", "body": body, "more_body": True})
            pinger.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if pinger is not None:
                pinger.cancel()
            await self._close()

    async def _told(self) -> AsyncGenerator[str, None]:
        """The events, and an error in the place where it happened."""
        try:
            if self._first is not None and (event := await self._first) is not None:
                yield event
            async for event in self._events:
                yield event
        except Exception as error:
            told = to_api_error(error)
            if told.code == "internal_error":
                logger.exception("a bug")
            else:
                logger.warning("%s", told.message)
            yield self._failed(told)

    async def _close(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait({self._first})
        await self._events.aclose()


async def _next(events: AsyncGenerator[str, None]) -> str | None:
    return await anext(events, None)
