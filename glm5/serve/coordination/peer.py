"""One end of the connection between the main process and a front end: messages and calls in both directions.

A frame has 4 bytes of length, then its kind and number, then a message. Messages are handled in the order in which they
were sent; a call whose answer takes a while does not hold up those after it.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from itertools import count
from typing import Any, Literal, Self, TypeVar

import msgspec

from glm5.serve.coordination.messages import Refused
from glm5.serve.http.errors import ApiError

logger = logging.getLogger(__name__)

MAX_CALLS = 1000  # unanswered ones to a process that should answer at once: it hangs
Kind = Literal["message", "call", "answer", "error"]
T = TypeVar("T")


class Frame(msgspec.Struct, array_like=True):
    kind: Kind
    number: int
    body: msgspec.Raw


class Peer:
    """Belongs to one event loop. `handle` gets each message, and returns the answer to a call, or an awaitable of it;
    it may raise ApiError. `accepts`: the type of messages that arrive."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        accepts: Any,
        handle: Callable[[Any], Any],
    ):
        self._reader, self._writer, self._handle = reader, writer, handle
        self._decoder, self._frames = msgspec.msgpack.Decoder(accepts), msgspec.msgpack.Decoder(Frame)
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @classmethod
    async def on(cls, connection: socket.socket, accepts: Any, handle: Callable[[Any], Any]) -> Self:
        """On a connected socket, which it closes at the end."""
        return cls(*await asyncio.open_connection(sock=connection), accepts, handle)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message that has no answer; without effect after the end."""
        self._send("message", 0, message)

    async def call(self, message: msgspec.Struct, answer: type[T] | Any = Any) -> Any:
        """Send a message, and return its answer. Raises the ApiError that the other end raised, and ConnectionError
        when it has ended or does not answer its calls any more."""
        if self._is_closed or len(self._waiting) >= MAX_CALLS:
            raise ConnectionError("the other process has ended, or hangs")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("call", number, message)
            return msgspec.msgpack.decode(await future, type=answer)
        finally:
            del self._waiting[number]

    def give_up(self, error: ApiError) -> None:
        """Have all calls that wait for an answer raise this error."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def run(self) -> None:
        """Handle what arrives until the connection ends."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4))
                self._receive(self._frames.decode(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._is_closed = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError("the other process has ended"))
            for task in self._answering:
                task.cancel()
            self._writer.close()

    def _receive(self, frame: Frame) -> None:
        if frame.kind in ("answer", "error"):
            future = self._waiting.get(frame.number)
            if future is None or future.done():  # its caller was cancelled
                return
            if frame.kind == "answer":
                future.set_result(frame.body)
            else:
                future.set_exception(_error(msgspec.msgpack.decode(frame.body, type=Refused)))
            return
        try:
            result = self._handle(self._decoder.decode(frame.body))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._refuse(frame, error)
            return
        if isawaitable(result):
            task = asyncio.ensure_future(self._answer_later(frame, result))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif frame.kind == "call":
            self._send("answer", frame.number, result)

    async def _answer_later(self, frame: Frame, result: Awaitable[Any]) -> None:
        try:
            answer = await result
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._refuse(frame, error)
            return
        if frame.kind == "call":
            self._send("answer", frame.number, answer)

    def _refuse(self, frame: Frame, error: Exception) -> None:
        if not isinstance(error, ApiError):
            logger.error("a message between the server's processes failed", exc_info=error)
            error = ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")
        if frame.kind == "call":
            refused = Refused(error.status, error.message, error.param, error.code, error.retry_after)
            self._send("error", frame.number, refused)

    def _send(self, kind: Kind, number: int, message: Any) -> None:
        if not self._is_closed:
            frame = self._encoder.encode((kind, number, message))
            self._writer.write(len(frame).to_bytes(4) + frame)


def _error(refused: Refused) -> ApiError:
    given = {"param": refused.param, "code": refused.code, "retry_after": refused.retry_after}
    return ApiError(refused.status, refused.message, **given)
