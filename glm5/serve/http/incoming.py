"""Limits the size of request bodies, and the time to receive them.

This middleware is inside `CancelOnDisconnect`, so its errors are raised where a route reads the body, and get the
format of the route's API.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm5.serve.http.errors import ApiError


class BoundedBody:
    """ASGI middleware: ApiError 413 and 408 for bodies that are too large or too slow."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float):
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = _Body(receive, Headers(scope=scope), self.max_bytes, self.seconds)
        await self.app(scope, receive, send)


class _Body:
    """Receives the messages of one body; counts its bytes and applies the deadline."""

    def __init__(self, receive: Receive, headers: Headers, max_bytes: int, seconds: float):
        self._receive, self._max_bytes, self._num_bytes = receive, max_bytes, 0
        self._deadline, self._seconds = asyncio.get_running_loop().time() + seconds, seconds
        length = headers.get("content-length", "")
        self._is_known_too_large = length.isdecimal() and int(length) > max_bytes
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        if self._is_known_too_large:
            raise self._too_large()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"the body was not complete after {self._seconds:g} s", code="body_timeout") from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            if self._num_bytes > self._max_bytes:
                raise self._too_large()
        return message

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="request_too_large")
