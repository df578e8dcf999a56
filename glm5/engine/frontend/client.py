"""The client of `LLM` and `AsyncEngine`: it sends requests and calls over a link, and delivers what comes back.

Any thread may submit, abort and call. One thread pumps, and passes every delta to the `deliver` of its request. When
the engine ends, all waiting requests and calls get `EngineDead` with the reason, and later ones get it at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from itertools import count
from random import Random
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import EngineDead, GlmError, RequestError, named
from glm5.engine.frontend.output_stream import OutputStream
from glm5.engine.frontend.outputs import Delta, RequestMetrics
from glm5.engine.frontend.request_builder import Options, RequestBuilder
from glm5.engine.frontend.text import AnswerText
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.link import FORKED, Link
from glm5.engine.transport.wire import (
    AbortRequests,
    Answer,
    Close,
    Dead,
    EngineInfo,
    Loading,
    Ready,
    StopAnswer,
    ToEngine,
    Update,
    Updates,
    first_id,
)

logger = logging.getLogger(__name__)

Deliver = Callable[["Request", Delta | GlmError], None]
_POLL_SECONDS = 0.1


class Request:
    """One prompt and its answers under way. `unfinished`: sequence ids of answers that have not ended."""

    def __init__(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, deliver: Deliver):
        self.request_id, self.prompt_ids, self.params, self.deliver = request_id, prompt_ids, params, deliver
        self.seq_ids: tuple[int, ...] = ()
        self.unfinished: set[int] = set()
        self.metrics = RequestMetrics(time.monotonic())


class Client:
    """Waits until the engine is ready, and raises its error otherwise. `on_loading` receives the progress.

    `eos_ids` end answers; `seed` generates the seeds of requests that have none.
    """

    def __init__(
        self,
        link: Link,
        tokenizer: Tokenizer | None,
        *,
        eos_ids: Sequence[int],
        seed: int | None = None,
        on_loading: Callable[[Loading], None] | None = None,
    ):
        self.tokenizer, self.link = tokenizer, link
        self._dead_because: str | None = None
        self._lock = threading.Lock()  # orders each request or call before or after the engine's end
        first = first_id(link.client)
        self._seeds, self._seq_ids, self._call_ids, self._numbers = Random(seed), count(first), count(first), count()
        self._growing: dict[int, tuple[Request, OutputStream]] = {}
        self._calls: dict[int, Future[dict[str, Any]]] = {}
        # The text of a token by itself, for log-probabilities.
        self._spell = cache(lambda token_id: None if tokenizer is None else tokenizer.decode([token_id]))
        self.info = self._wait_until_ready(on_loading)
        self.request_builder = RequestBuilder(self.info, tokenizer, eos_ids)

    @property
    def dead_because(self) -> str | None:
        """Why nothing is served: the engine has ended, or this process is a fork of its owner. None while it serves."""
        return self._dead_because or (FORKED if self.link.is_forked else None)

    @property
    def num_unfinished(self) -> int:
        """Number of answers that have not ended."""
        return len(self._growing)

    def check_alive(self) -> None:
        """EngineDead once the engine has ended."""
        if self.dead_because is not None:
            raise EngineDead(self.dead_because)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, options: Options) -> list[int]:
        """The prompt's ids, truncated if the parameters say so. RequestError for a request that cannot be served."""
        return self.request_builder.check(prompt_ids, params, options)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: Options,
        deliver: Deliver,
        request_id: str | None = None,
    ) -> Request:
        """Send a request. `deliver` gets its deltas in the pumping thread, or one error and nothing after it. Raises
        RequestError for a request that cannot be served, EngineDead when the engine has ended."""
        prompt_ids = self.request_builder.check(prompt_ids, params, options)
        request = Request(str(next(self._numbers)) if request_id is None else request_id, prompt_ids, params, deliver)
        request.seq_ids = tuple(next(self._seq_ids) for _ in range(params.n))
        request.unfinished.update(request.seq_ids)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        message = self.request_builder.build(request.seq_ids, seed, prompt_ids, params, options)
        with self._lock:
            self.check_alive()
            for index, seq_id in enumerate(request.seq_ids):
                text = AnswerText(self.tokenizer if params.detokenize else None, params)
                self._growing[seq_id] = request, OutputStream(index, params, text, self._spell)
            try:
                self.link.send(message)
            except BaseException:  # no update will arrive
                for seq_id in request.seq_ids:
                    del self._growing[seq_id]
                raise
        return request

    def abort(self, request: Request) -> None:
        """Abort a request in any state. Nothing more of it is delivered once the current `pump` returns."""
        known = [seq_id for seq_id in request.seq_ids if self._growing.pop(seq_id, None) is not None]
        if known:
            self.link.send(AbortRequests(tuple(known)))

    def abort_all(self) -> None:
        """Abort all requests; each answer's last delta has finish_reason "abort"."""
        self.link.send(AbortRequests())

    def call(self, make: Callable[[int], ToEngine]) -> Future[dict[str, Any]]:
        """Send `make(call_id)`; `pump` sets the result, or the GlmError if the engine refuses."""
        future: Future[dict[str, Any]] = Future()
        call_id = next(self._call_ids)
        with self._lock:
            self.check_alive()
            self._calls[call_id] = future
            try:
                self.link.send(make(call_id))
            except BaseException:
                del self._calls[call_id]
                raise
        return future

    def pump(self, timeout: float) -> None:
        """Deliver messages that arrived, waiting for them up to `timeout` seconds."""
        for message in self.link.receive(timeout):
            match message:
                case Updates(updates):
                    for update in updates:
                        self._deliver(update)
                case Answer():
                    self._answer(message)
                case Dead(reason):
                    self._die(reason)
                case _:
                    pass

    def close(self) -> None:
        """Ask the engine to end, and end all answers with "abort". A later `pump` finds it dead."""
        for seq_id in list(self._growing):
            if (known := self._growing.pop(seq_id, None)) is not None:
                request, stream = known
                request.deliver(request, Delta((), (), "abort", index=stream.index))
        self.link.send(Close())

    def fail(self, reason: str) -> None:
        """Kill the engine because of an error in this process."""
        self.link.kill()
        self._die(reason)

    def _wait_until_ready(self, on_loading: Callable[[Loading], None] | None) -> EngineInfo:
        try:
            while True:
                for message in self.link.receive(_POLL_SECONDS):
                    match message:
                        case Ready(info):
                            return info
                        case Dead(reason, kind):
                            raise named(kind, reason)
                        case Loading() if on_loading is not None:
                            on_loading(message)
                        case _:
                            pass
        except BaseException:
            self.link.kill()
            raise

    def _deliver(self, update: Update) -> None:
        known = self._growing.get(update.seq_id)
        if known is None:  # aborted, or ended by a stop string, before this update arrived
            return
        request, stream = known
        if update.finish_reason == "error":
            self.abort(request)
            request.deliver(request, RequestError(update.error or "the engine could not answer it", update.param))
            return
        now = time.monotonic()
        delta = stream.grow(update, request.metrics.arrival_time, now)
        if delta.token_ids:
            metrics = request.metrics
            metrics.last_token_time = now
            metrics.first_token_time = metrics.first_token_time or now
        if delta.finish_reason is not None:
            self._growing.pop(update.seq_id, None)
            if stream.found_stop:
                self.link.send(StopAnswer(update.seq_id))
            request.unfinished.discard(update.seq_id)
            if not request.unfinished:
                request.metrics.finished_time = now
        request.deliver(request, delta)

    def _answer(self, answer: Answer) -> None:
        future = self._calls.pop(answer.call_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if answer.error is None:
            future.set_result(answer.result)
        else:
            future.set_exception(named(answer.kind, answer.error))

    def _die(self, reason: str) -> None:
        with self._lock:
            self._dead_because = reason
            requests = {request for request, _ in list(self._growing.values())}
            futures = list(self._calls.values())
            self._growing.clear()
            self._calls.clear()
        for request in requests:
            request.deliver(request, EngineDead(reason))
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDead(reason))
