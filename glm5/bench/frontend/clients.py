"""Clients that only count: each sends one request after another, and looks for events in what arrives.

They take so little time that the server is what is measured. `Found.busy_s` is that time, so `run.py` can say how many
events a second they could have read.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from glm5.common.errors import GlmError

_END, _DONE, _EVENT = b"0\r\n\r\n", b"data: [DONE]\n\n", b"data: {"


@dataclass
class Found:
    """What the clients saw. Times in seconds; `gaps`: between reads of one answer that brought events."""

    num_requests: int = 0
    num_events: int = 0
    num_bytes: int = 0
    first: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])
    seconds: float = 0.0
    busy_s: float = 0.0


class _Client(asyncio.Protocol):
    def __init__(self, requests: Iterator[bytes], found: Found, done: "asyncio.Future[None]"):
        self._requests, self._found, self._done = requests, found, done
        self._transport: asyncio.Transport | None = None
        self._tail, self._sent = b"", 0.0
        self._last: float | None = None  # when events arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            return
        self._tail, self._sent, self._last = b"", time.perf_counter(), None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        found, now = self._found, time.perf_counter()
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._fail(f"a request failed: {data[:300]!r}")
            return
        events = data.count(_EVENT)
        found.num_bytes += len(data)
        if events:
            found.num_events += events
            if self._last is None:
                found.first.append(now - self._sent)
            else:
                found.gaps.append(now - self._last)
            self._last = now
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(_END):
            if _DONE not in self._tail:
                self._fail(f"an answer ended without [DONE]: {self._tail!r}")
                return
            found.num_requests += 1
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(GlmError(why))


def run(host: str, port: int, requests: list[bytes], num_clients: int) -> Found:
    """Send all requests. Raises GlmError if one fails."""

    async def main() -> Found:
        found, loop, left = Found(), asyncio.get_running_loop(), iter(requests)
        began, busy = time.perf_counter(), time.process_time()
        done = [loop.create_future() for _ in range(num_clients)]
        for one in done:
            await loop.create_connection(lambda one=one: _Client(left, found, one), host, port)
        await asyncio.gather(*done)
        found.seconds, found.busy_s = time.perf_counter() - began, time.process_time() - busy
        return found

    return asyncio.run(main())
