"""The loop under asyncio: a thread owns model and cache, coroutines get their deltas from it.

    async with engine.generate(prompt_ids, params) as deltas:      # leaving the block aborts
        async for delta in deltas: ...

Requests of all coroutines are decoded together; a new one joins between two steps. Everything that the thread is
told goes through one inbox, on which it sleeps when it has no work. When the loop raises, every request that waits
gets that reason as `EngineStopped`, and so does every later one.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from glm5.engine.defaults import GenerationDefaults
from glm5.engine.llm import LLM
from glm5.engine.outputs import Delta
from glm5.engine.params import SamplingParams
from glm5.engine.request import Request

logger = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """The engine was closed or died; the message says why. Nothing will be generated any more."""


@dataclass(frozen=True)
class _Submit:
    request: Request
    stream: "_Stream"


@dataclass(frozen=True)
class _Abort:
    request: Request


@dataclass(frozen=True)
class _Close:
    pass


class _Stream:
    """The way of a request's deltas from the engine's thread to the event loop that waits for them."""

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Delta | EngineStopped] = asyncio.Queue()

        self._ended = False

    def put(self, item: Delta | EngineStopped) -> bool:
        """From the engine's thread. False when the event loop is closed: nobody will ever read."""
        try:
            self.event_loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            return False
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        item = await self.items.get()
        if isinstance(item, EngineStopped):
            raise item
        self._ended = item.finish_reason is not None
        return item


class AsyncEngine:
    """Generates for many coroutines at once. `start` and `close` it, or use it as a context manager.

    It takes over the loop of `llm`, which must not be used directly from then on.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._loop = llm.loop
        self._inbox: SimpleQueue[_Submit | _Abort | _Close] = SimpleQueue()
        self._streams: dict[Request, _Stream] = {}
        # Guards `_stopped` against a submission slipping in behind the last look at the inbox.
        self._lock = threading.Lock()
        self._stopped: str | None = "it was not started"
        self._thread = threading.Thread(target=self._run, name="glm5-engine")

    @property
    def max_model_len(self) -> int:
        return self.llm.max_model_len

    @property
    def defaults(self) -> GenerationDefaults:
        """The checkpoint's sampling defaults."""
        return self.llm.defaults

    @property
    def is_ready(self) -> bool:
        """Whether requests are being served."""
        return self._stopped is None

    @property
    def stopped_because(self) -> str | None:
        """Why requests are not being served, or None while they are."""
        return self._stopped

    def start(self) -> None:
        self._stopped = None
        self._thread.start()

    def close(self) -> None:
        """End the thread. Requests still running end with finish_reason "abort". Closing again does nothing."""
        if self._thread.is_alive():
            self._inbox.put(_Close())
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """What `generate` would refuse at once: RequestError for a bad request, EngineStopped when not running."""
        self._loop.check(prompt_ids, params)
        self._check_running()

    @asynccontextmanager
    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        """Deltas of one answer; the last has a finish_reason. Leaving the block early aborts the request.

        Raises RequestError for a request that cannot be served and EngineStopped when the engine is not running.
        """
        request, stream = self._loop.prepare(prompt_ids, params, request_id), _Stream()
        with self._lock:
            self._check_running()
            self._inbox.put(_Submit(request, stream))
        try:
            yield stream
        finally:
            if request.finish_reason is None:
                self._inbox.put(_Abort(request))

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise EngineStopped(f"the engine is not running: {self._stopped}")

    def _run(self) -> None:
        failure = None
        try:
            while self._read_inbox():
                self._deliver(self._loop.step())
        except Exception as error:
            # Whatever it was, the requests that wait must learn of it; nothing else would tell them.
            logger.exception("the engine stopped")
            failure = f"{type(error).__name__}: {error}"
        self._stop(failure)

    def _read_inbox(self) -> bool:
        """Do what the inbox says, sleeping on it while there is no work. False when the engine is to close."""
        while not self._inbox.empty() or not self._loop.has_work:
            match self._inbox.get():
                case _Submit(request, stream):
                    self._streams[request] = stream
                    self._loop.submit(request)
                case _Abort(request):
                    if self._streams.pop(request, None) is not None:
                        self._loop.abort(request)
                case _Close():
                    return False
        return True

    def _deliver(self, gained: Sequence[tuple[Request, Delta]]) -> None:
        for request, delta in gained:
            stream = self._streams[request]
            heard = stream.put(delta)
            if request.finish_reason is not None or not heard:
                del self._streams[request]
                self._loop.abort(request)

    def _stop(self, failure: str | None) -> None:
        """Refuse new requests, and end those that run or still lie in the inbox."""
        with self._lock:
            self._stopped = failure or "it was closed"
        while not self._inbox.empty():
            if isinstance(command := self._inbox.get(), _Submit):
                self._streams[command.request] = command.stream
        for request, stream in self._streams.items():
            self._loop.abort(request)
            stream.put(Delta((), (), "abort") if failure is None else EngineStopped(f"the engine stopped: {failure}"))
        self._streams.clear()
