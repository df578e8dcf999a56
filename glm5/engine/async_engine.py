"""The engine under asyncio: a thread receives its messages, and passes deltas to coroutines.

    async with engine.generate(prompt_ids, params) as deltas:      # leaving the block aborts
        async for delta in deltas: ...

Requests of all coroutines, of any event loop, are batched together. When the engine ends, every waiting request and
every later one gets the reason as `EngineDead`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import WeakKeyDictionary

from glm5.common.errors import EngineDead, GlmError, RequestError, reason_of
from glm5.config.model import ModelConfig
from glm5.engine.defaults import GenerationDefaults
from glm5.engine.frontend.calls import Called, Calls
from glm5.engine.frontend.client import Request
from glm5.engine.frontend.output_stream import OutputStream
from glm5.engine.frontend.outputs import Delta
from glm5.engine.frontend.request_builder import options_of
from glm5.engine.joined import JoinedLLM
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.link import CLOSED

if TYPE_CHECKING:
    from glm5.config.engine import Channel
    from glm5.engine.frontend.calls import Source
    from glm5.engine.transport.wire import EngineInfo, Policy

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_AT_ONCE = 32  # coroutines woken in one turn of their event loop

Item = OutputStream | GlmError


class Deltas:
    """A request's deltas, from the pump to the coroutine that waits for them.

    `divert`: a function that is given each delta that arrives while the coroutine waits, in the turn of the event loop
    in which it arrives. What it accepts by returning True the coroutine does not see.
    """

    __slots__ = ("_context", "_deltas", "_error", "_items", "_num_left", "_waiter", "divert", "event_loop")

    def __init__(self, num_answers: int) -> None:
        self.event_loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._deltas: deque[Delta] = deque()  # taken
        self._waiter: asyncio.Future[None] | None = None
        self._num_left = num_answers
        self._error: Exception | None = None
        self._context = copy_context()  # of the request's task, for `divert`
        self.divert: Callable[[Delta], bool] | None = None

    def put(self, item: Item) -> None:
        """On the event loop's thread."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._items.append(item)
            return
        if self.divert is None or isinstance(item, GlmError):
            self._items.append(item)
        else:
            deltas = item.take()
            try:
                while deltas and self._context.run(self.divert, deltas[0]):
                    del deltas[0]
            except Exception as error:  # noqa: BLE001 - raised again in the coroutine
                self._error = error
            self._deltas += deltas
            if not deltas:
                return
        self._waiter = None
        waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while self._num_left and not self._deltas:
            if not self._items:
                waiter = self._waiter = self.event_loop.create_future()
                await waiter
                if self._error is not None:
                    raise self._error
                continue
            item = self._items.popleft()
            if isinstance(item, GlmError):
                self._num_left = 0
                raise item
            self._deltas.extend(item.take())
        if not self._deltas:
            raise StopAsyncIteration
        delta = self._deltas.popleft()
        self._num_left -= delta.finish_reason is not None
        return delta


_Arrived = tuple[Deltas, Request, Item]


class _Dispatch:
    """Wakes the coroutines of one event loop: those that get their first tokens before all others.

    The others are woken a few at a time, so that what has come meanwhile, first tokens and new requests, need not wait
    for all of them. What else arrives for them until their turn is theirs then, in one delta.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._later: deque[tuple[Deltas, Item]] = deque()
        self._is_scheduled = self._flushes = False
        self.arrived: list[_Arrived] = []  # from any thread, since the last `pass_on`

    def flush_soon(self, flush: Callable[[], None]) -> None:
        """Call `flush` once the coroutines that are ready have run. On the event loop's thread."""
        if not self._flushes:
            self._flushes = True
            self._event_loop.call_soon(self._flush, flush)

    def _flush(self, flush: Callable[[], None]) -> None:
        self._flushes = False
        flush()

    def pass_on(self, abort: Callable[[Request], None]) -> None:
        """Pass what has arrived to the event loop. From one thread at a time. `abort` ends requests of a closed one."""
        if not self.arrived:
            return
        arrived = self.arrived[:]
        del self.arrived[: len(arrived)]
        try:
            self._event_loop.call_soon_threadsafe(self.add, arrived)
        except RuntimeError:
            for _, request, _ in arrived:
                abort(request)

    def add(self, arrived: Sequence[_Arrived]) -> None:
        for stream, _, item in arrived:
            if isinstance(item, OutputStream) and item.has_begun:
                self._later.append((stream, item))
            else:
                stream.put(item)
        if not self._is_scheduled:
            self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(_AT_ONCE, len(self._later))):
            stream, item = self._later.popleft()
            stream.put(item)
        self._is_scheduled = bool(self._later)
        if self._is_scheduled:
            self._event_loop.call_soon(self._wake_some)


class Generation:
    """The result of `AsyncEngine.generate`. `async with` gives its deltas. It can also be iterated directly, but then
    leaving the loop early aborts the request only when the iterator is garbage-collected."""

    def __init__(self, begin: Callable[[], tuple[Deltas, Request]], end: Callable[[Request], None]):
        self._begin, self._end = begin, end

    async def __aenter__(self) -> AsyncIterator[Delta]:
        deltas, self._request = self._begin()
        return deltas

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self._request)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async with self as deltas:
            async for delta in deltas:
                yield delta


class AsyncEngine:
    """Generates for many coroutines at once. `start` and `close` it, or use it as a context manager,
    with `with` or `async with`.

    Takes what `LLM` takes, or an `LLM`, which must not be used directly from then on and is closed with it.
    """

    def __init__(self, llm: LLM | Any, *args: Any, **kwargs: Any):
        self.llm: LLM | JoinedLLM = llm if isinstance(llm, (LLM, JoinedLLM)) else LLM(llm, *args, **kwargs)
        self._client = self.llm.hand_over()
        self._calls = Calls(self._client)
        # Each event loop is woken once for all that one call of the pump received.
        self._dispatches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Dispatch] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._requests: set[Request] = set()
        self._is_started, self._is_closing = False, False
        self._thread = threading.Thread(target=self._run, name="glm5-engine", daemon=True)

    @property
    def max_model_len(self) -> int:
        return self.llm.max_model_len

    @property
    def info(self) -> EngineInfo:
        """Sizes of the engine."""
        return self._client.info

    @property
    def cfg(self) -> ModelConfig:
        return self.llm.cfg

    @property
    def table(self) -> Sequence[tuple[str, str]]:
        """The resolved settings, for display."""
        return self.llm.table

    @property
    def defaults(self) -> GenerationDefaults:
        """The checkpoint's sampling defaults."""
        return self.llm.defaults

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self.stopped_because is None

    @property
    def stopped_because(self) -> str | None:
        """Why requests are not served, or None while they are."""
        if not self._is_started:
            return "it was not started"
        return self._client.dead_because or (CLOSED if self._is_closing else None)

    def start(self) -> None:
        self._is_started = True
        self._thread.start()

    def close(self) -> None:
        """End the engine and the thread. Requests still running end with finish_reason "abort". Closing again does
        nothing."""
        self._is_closing = True
        self._client.close()
        self._calls.close()
        self._wake()
        if self._is_started:
            self._thread.join()
        else:
            self._run()

    def kill(self, reason: str = "it was killed") -> None:
        """Kill the engine: it writes nothing more to disk, and requests still running get EngineDead with the
        reason."""
        self._is_closing = True
        self._client.fail(reason)
        self._wake()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> None:
        """Raise what `generate` would raise: RequestError for a bad request, EngineDead when not running."""
        self._client.check(prompt_ids, params, options_of(options))
        self._check_running()

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        stream_interval: int = 1,
        **options: Any,
    ) -> Generation:
        """Deltas of the answers to one prompt; the last of each `index` has a finish_reason. Leaving the block early
        aborts the request. `options`: fields of `Options`, such as priority. `stream_interval`: tokens that a delta has
        at least, except for an answer's first and last. With `output_kind` FINAL_ONLY an answer is one delta.

        Entering raises RequestError for a request that cannot be served and EngineDead when the engine is not running.
        """
        return Generation(partial(self._begin, prompt_ids, params, request_id, stream_interval, options), self._end)

    def _begin(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        interval: int,
        options: Mapping[str, Any],
    ) -> tuple[Deltas, Request]:
        self._check_running()
        checked = options_of(options)
        if not isinstance(request_id, (str, type(None))):
            raise RequestError(f"request_id is {request_id!r:.60}; allowed: a text", param="request_id")
        if type(interval) is not int or interval < 1:
            raise RequestError(f"stream_interval is {interval!r:.60}; allowed: 1 or more", param="stream_interval")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r:.60}; allowed: a SamplingParams", param="sampling_params")
        stream = Deltas(params.n)

        dispatch = self._dispatch()
        arrived = dispatch.arrived

        def deliver(request: Request, item: Item) -> None:
            arrived.append((stream, request, item))

        request = self._client.submit(prompt_ids, params, checked, deliver, request_id, interval, is_held=True)
        dispatch.flush_soon(self._client.flush)
        self._requests.add(request)
        return stream, request

    def _end(self, request: Request) -> None:
        self._requests.discard(request)
        self._client.abort(request)

    def abort(self, request_id: str) -> int:
        """End all requests of this id; their last deltas have finish_reason "abort". Returns how many requests."""
        found = [request for request in list(self._requests) if request.request_id == request_id]
        for request in found:
            self._client.abort(request)
            for seq_id, answer in request.streams.items():
                if seq_id in request.unfinished:
                    answer.abort()
                    request.deliver(request, answer)
        if found:
            self._wake()
        return len(found)

    async def pause(self) -> None:
        """See `LLM`, as for the following."""
        await self._wait(self._calls.pause())

    async def resume(self) -> None:
        await self._wait(self._calls.resume())

    async def abort_all(self) -> None:
        """End every request; their streams end with finish_reason "abort"."""
        self._check_running()
        self._client.abort_all()

    async def sleep(self, level: Literal[1, 2] = 1) -> int:
        return (await self._wait(self._calls.sleep(level)))["freed_bytes"]

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._wait(self._calls.wake_up(tags))

    async def update_weights(
        self,
        source: Source,
        *,
        policy: Policy = "recompute",
        version: int | None = None,
        max_key_age: int = 1,
        channel: Channel = "auto",
    ) -> int:
        self._check_running()
        # All tensors are looked at first.
        future = await asyncio.to_thread(self._calls.update_weights, source, policy, version, max_key_age, channel)
        return (await self._wait(future))["version"]

    async def reset_prefix_cache(self) -> None:
        await self._wait(self._calls.reset_prefix_cache())

    async def stats(self) -> dict[str, Any]:
        return await self._wait(self._calls.stats())

    async def profile(self, folder: str | None) -> str | None:
        """Start a trace of the engine that is written to `folder`; None ends it and returns its path."""
        return (await self._wait(self._calls.profile(folder))).get("path")

    async def _wait(self, future: Called) -> dict[str, Any]:
        self._check_running()
        return await asyncio.wrap_future(future)

    def _check_running(self) -> None:
        if (reason := self.stopped_because) is not None:
            raise EngineDead(reason)

    def _run(self) -> None:
        try:
            while self._client.dead_because is None:
                self._client.pump(_POLL_SECONDS)
                self._wake()
        except Exception as error:
            # A bug in this process; waiting requests must still get an error.
            logger.exception("the engine is ended, as its messages cannot be read")
            self._client.fail(reason_of(error))
            self._wake()

    def _wake(self) -> None:
        """Pass what has arrived to the event loops. Requests of a closed event loop are aborted."""
        with self._lock:
            for dispatch in list(self._dispatches.values()):
                dispatch.pass_on(self._client.abort)

    def _dispatch(self) -> _Dispatch:
        """That of the running event loop."""
        event_loop = asyncio.get_running_loop()
        with self._lock:
            if (dispatch := self._dispatches.get(event_loop)) is None:
                dispatch = self._dispatches[event_loop] = _Dispatch(event_loop)
            return dispatch
