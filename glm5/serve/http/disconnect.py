"""Aborts a request when its client disconnects, whether it streams or not, waits or runs.

FastAPI reports a lost connection to a handler only when it next reads or writes. This middleware watches the connection
all the time and cancels the handler at once; leaving `engine.generate` then aborts the request in the engine.
"""

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class CancelOnDisconnect:
    """ASGI middleware around a whole application."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Holds one message at most, so that a large body is not read faster than the handler consumes it.
        inbox: asyncio.Queue[Message] = asyncio.Queue(maxsize=1)
        answered = has_left = False

        async def listen(handler: asyncio.Task[Any]) -> None:
            nonlocal has_left
            while (message := await receive())["type"] != "http.disconnect":
                await inbox.put(message)
            # Servers report a disconnect after a complete response too; then the handler is left to finish.
            if not answered:
                has_left = True
                handler.cancel()

        async def watched_send(message: Message) -> None:
            nonlocal answered
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        listener = asyncio.create_task(listen(task))
        try:
            await self.app(scope, inbox.get, watched_send)
        except asyncio.CancelledError:
            if not has_left or task.uncancel():
                raise
            logger.info("%s %s: the client disconnected", scope["method"], scope["path"])
        finally:
            listener.cancel()
