"""A client of one server: measured requests, and plain reads of small routes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from glm5.bench.serve.api_formats import ApiFormat, Message, Prompt, message_of
from glm5.bench.serve.failure import BAD_ANSWER, TIMEOUT, RequestFailed
from glm5.bench.serve.http import Address, Answer, Pool
from glm5.bench.serve.record import Record
from glm5.bench.serve.sse import Events

MAX_ERROR = 65536  # bytes kept of the body of an error
MAX_REPLY = 1 << 26  # bytes of a plain answer; a page of metrics has a few hundred thousand


@dataclass
class ReplyText:
    """The answer's text, which is part of the prompt of the conversation's next turn."""

    text: str = ""
    reasoning: str = ""


class Client:
    """Sends requests to one server. `endpoint` replaces the dialect's route."""

    def __init__(
        self,
        pool: Pool,
        address: Address,
        dialect: ApiFormat,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 3600.0,
        endpoint: str | None = None,
    ) -> None:
        self._pool, self._address, self._dialect = pool, address, dialect
        self._headers, self._timeout = dict(headers or {}), timeout
        self._path = endpoint or dialect.path
        self._loop = asyncio.get_running_loop()
        self.num_chunks = 0
        self.server = ""

    def check(self, prompt: Prompt) -> None:
        """Raises ConfigError for a prompt that this route does not accept."""
        self._dialect.body(prompt, 1)

    async def ask(self, record: Record, prompt: Prompt, max_tokens: int, tools: Sequence[Message] = ()) -> ReplyText:
        """Send a request and fill in its record. `record.error` is the kind of failure, or None."""
        body = self._dialect.body(prompt, max_tokens, tools)
        request = self._address.request("POST", self._path, self._headers, body)
        reader = _ResponseReader(self._dialect, record)
        record.sent = self._loop.time()
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._pool.send(request, reader.receive)
            self.server = answer.headers.get("server", self.server)
            reader.finish(answer, self._loop.time())
            record.finalize()
            record.error = None
        except RequestFailed as error:
            record.error, record.message = error.kind, error.message
        except TimeoutError:
            record.error, record.message = TIMEOUT, f"no whole answer within {self._timeout:g} s"
        self.num_chunks += reader.num_chunks
        return reader.reply

    async def fetch(self, method: str, path: str, body: Any = None) -> bytes:
        """The body of a response. Raises `RequestFailed` for any status but success."""
        reply = bytearray()

        def receive(_answer: Answer, piece: bytes, _now: float) -> None:
            reply.extend(piece)
            if len(reply) > MAX_REPLY:
                raise RequestFailed(BAD_ANSWER, f"{path} answered more than {MAX_REPLY} bytes")

        content = b"" if body is None else msgspec.json.encode(body)
        request = self._address.request(method, path, self._headers, content)
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._pool.send(request, receive)
        except TimeoutError:
            raise RequestFailed(TIMEOUT, f"{path}: no answer within {self._timeout:g} s") from None
        if not 200 <= answer.status < 300:
            raise RequestFailed(f"http {answer.status}", _error_text(bytes(reply)))
        return bytes(reply)


class _ResponseReader:
    """Reads the streamed body of one response."""

    def __init__(self, dialect: ApiFormat, record: Record) -> None:
        self._dialect, self._record = dialect, record
        self._events = Events()
        self._error = bytearray()
        self.reply = ReplyText()
        self.num_chunks = 0

    def receive(self, answer: Answer, piece: bytes, now: float) -> None:
        if answer.status != 200:
            self._error += piece[: MAX_ERROR - len(self._error)]
            return
        for data in self._events.feed(piece):
            self._take(data, now)

    def finish(self, answer: Answer, now: float) -> None:
        """Process the end of the body. Raises `RequestFailed` if the status is not 200."""
        if answer.status != 200:
            raise RequestFailed(f"http {answer.status}", _error_text(bytes(self._error)))
        for data in self._events.finish():
            self._take(data, now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._record.finish = self._record.finish or "[DONE]"
            return
        self.num_chunks += 1
        piece = self._dialect.read(data)
        self._record.add(piece, now)
        if piece.text:
            self.reply.text = self._dialect.join(self.reply.text, piece.text)
        if piece.reasoning:
            self.reply.reasoning += piece.reasoning


def _error_text(body: bytes) -> str:
    try:
        return message_of(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return message_of(body.decode("utf-8", "replace"))
