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
from typing import Any, Self

from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

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


def keep_alive_for(user_agent: str) -> str:
    """The keep-alive text that this client can read."""
    return EMPTY_LINE if any(name in user_agent.lower() for name in _READS_LINES) else COMMENT


class EventStream(StreamingResponse):
    """A response that sends complete events. `failed` formats an error as the end of the stream. `ping` is sent when
    nothing else was for a while: by default a comment, or an empty line to clients that cannot read comments. `events`
    is closed however the response ends."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], *, failed: Callable[[ApiError], str], ping: str | None = None
    ) -> None:
        self._events, self._failed, self._ping = events, failed, ping
        self._first: asyncio.Task[str | None] | None = None
        super().__init__(self._with_error(), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    @classmethod
    async def begun(
        cls, events: AsyncGenerator[str, None], *, failed: Callable[[ApiError], str], ping: str | None = None
    ) -> Self:
        """A stream whose first event has arrived, or is late. Raises an exception that arrives instead of it."""
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

    async def _with_error(self) -> AsyncGenerator[str, None]:
        """The events; an exception becomes the last event."""
        try:
            if self._first is not None and (event := await self._first) is not None:
                yield event
            async for event in self._events:
                yield event
        except Exception as error:
            api_error = to_api_error(error)
            if api_error.code == "internal_error":
                logger.exception("internal error in a stream")
            else:
                logger.warning("%s", api_error.message)
            yield self._failed(api_error)

    async def _close(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait({self._first})
        await self._events.aclose()


async def _next(events: AsyncGenerator[str, None]) -> str | None:
    return await anext(events, None)
