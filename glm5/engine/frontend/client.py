"""The client of `LLM` and `AsyncEngine`: it sends requests and calls over a link, and receives what comes back.

Any thread may submit, abort and call. One thread pumps: it adds what arrives to the answers' streams, and tells the
`deliver` of their requests, from which on these take it. When the engine ends, all waiting requests and calls get
`EngineDead` with the reason, and later ones get it at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from itertools import count, repeat
from random import Random
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import EngineDead, GlmError, RequestError, named, reason_of
from glm5.engine.frontend.output_stream import NEVER, OutputStream
from glm5.engine.frontend.outputs import RequestMetrics
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
    Growth,
    Loading,
    Ready,
    StopAnswer,
    ToEngine,
    Update,
    Updates,
    first_id,
)

logger = logging.getLogger(__name__)

Deliver = Callable[["Request", OutputStream | GlmError], None]
_POLL_SECONDS = 0.1
_MOST_HELD = 256  # requests, sent with the next one: a step of the engine waits while they are read


class Request:
    """One prompt and its answers under way. `unfinished`: sequence ids of answers that have not ended."""

    def __init__(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, deliver: Deliver):
        self.request_id, self.prompt_ids, self.params, self.deliver = request_id, prompt_ids, params, deliver
        self.streams: dict[int, OutputStream] = {}  # by sequence id
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
        self._lock = threading.RLock()  # orders each request or call before or after the engine's end
        self._held: list[ToEngine] = []  # requests that go with the next message, or `flush`
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
        interval: int = 1,
        *,
        is_held: bool = False,
    ) -> Request:
        """Send a request; `is_held`: with the next one or at `flush`, since many in one message are cheaper.

        In the pumping thread `deliver` gets each stream that has news, once until they are taken, or one error and
        nothing after it. `interval`: after an answer's first tokens, only if it has so many new ones, or has ended.
        Raises RequestError for a request that cannot be served, EngineDead when the engine has ended.
        """
        prompt_ids = self.request_builder.check(prompt_ids, params, options)
        request = Request(str(next(self._numbers)) if request_id is None else request_id, prompt_ids, params, deliver)
        no_text = None if params.detokenize else AnswerText(None, params)  # of which nothing is to be kept apart
        sent = request.metrics.arrival_time
        for index in range(params.n):
            text = no_text or AnswerText(self.tokenizer, params)
            stream = OutputStream(index, params, text, self._spell, sent=sent, interval=interval)
            request.streams[next(self._seq_ids)] = stream
        request.unfinished.update(request.streams)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        message = self.request_builder.build(tuple(request.streams), seed, prompt_ids, params, options)
        with self._lock:
            self.check_alive()
            for seq_id, stream in request.streams.items():
                self._growing[seq_id] = request, stream
            try:
                if is_held and len(self._held) < _MOST_HELD:
                    self._held.append(message)
                else:
                    self._send(message)
            except BaseException:  # no update will arrive
                for seq_id in request.streams:
                    del self._growing[seq_id]
                raise
        return request

    def flush(self) -> None:
        """Send the requests that are held."""
        try:
            self._send()
        except Exception as error:
            logger.exception("requests could not be sent")
            self.fail(reason_of(error))

    def abort(self, request: Request) -> None:
        """Abort a request in any state. Nothing more of it is delivered once the current `pump` returns."""
        known = [seq_id for seq_id in request.streams if self._growing.pop(seq_id, None) is not None]
        if known:
            self._send(AbortRequests(tuple(known)))

    def abort_all(self) -> None:
        """Abort all requests; each answer's last delta has finish_reason "abort"."""
        self._send(AbortRequests())

    def call(self, make: Callable[[int], ToEngine]) -> Future[dict[str, Any]]:
        """Send `make(call_id)`; `pump` sets the result, or the GlmError if the engine refuses."""
        future: Future[dict[str, Any]] = Future()
        call_id = next(self._call_ids)
        with self._lock:
            self.check_alive()
            self._calls[call_id] = future
            try:
                self._send(make(call_id))
            except BaseException:
                del self._calls[call_id]
                raise
        return future

    def pump(self, timeout: float) -> None:
        """Deliver messages that arrived, waiting for them up to `timeout` seconds."""
        for message in self.link.receive(timeout):
            match message:
                case Updates(updates, growth):
                    now = time.monotonic()
                    if growth is not None:
                        self._grow(growth, now)
                    for update in updates:
                        self._update(update, now)
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
                stream.abort()
                request.deliver(request, stream)
        self._send(Close())

    def fail(self, reason: str) -> None:
        """Kill the engine because of an error in this process."""
        self.link.kill()
        self._die(reason)

    def _send(self, *messages: ToEngine) -> None:
        """Send messages, after what is held."""
        if self.link.is_forked:  # a thread that is not here may hold the lock
            return
        with self._lock:
            held, self._held = self._held, []
            if held or messages:
                self.link.send(*held, *messages)

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

    def _grow(self, growth: Growth, now: float) -> None:
        """Add the tokens of a step to their streams. This is run for every token: it must be short."""
        growing, version = self._growing, growth.version
        if growth.counts or growth.sampling_mask:
            for update in growth.updates():
                self._update(update, now)
            return
        entries = growth.logprobs or repeat(None, len(growth.seq_ids))
        for seq_id, token_id, entry in zip(growth.seq_ids, growth.token_ids, entries, strict=True):
            known = growing.get(seq_id)
            if known is None:  # see `_update`
                continue
            request, stream = known
            stream.add_token(token_id, version, now, entry)
            if stream.found_stop:
                self._end(seq_id, request, stream, now)
            if stream.found_stop or len(stream.news) >= stream.threshold:
                stream.threshold = NEVER
                request.deliver(request, stream)

    def _update(self, update: Update, now: float) -> None:
        known = self._growing.get(update.seq_id)
        if known is None:  # aborted, or ended by a stop string, before this update arrived
            return
        request, stream = known
        if update.finish_reason == "error":
            self.abort(request)
            request.deliver(request, RequestError(update.error or "the engine could not answer it", update.param))
            return
        stream.add(update, now)
        metrics = request.metrics
        if update.token_ids:
            metrics.first_token_time = metrics.first_token_time or now
        has_ended = update.finish_reason is not None or stream.found_stop
        if has_ended:
            self._end(update.seq_id, request, stream, now)
        if has_ended or len(stream.news) >= stream.threshold:
            stream.threshold = NEVER
            request.deliver(request, stream)

    def _end(self, seq_id: int, request: Request, stream: OutputStream, now: float) -> None:
        """An answer has ended; the engine is told if it does not know."""
        self._growing.pop(seq_id, None)
        if stream.found_stop:
            self._send(StopAnswer(seq_id))
        metrics = request.metrics
        if metrics.first_token_time is not None:
            metrics.last_token_time = max(stream.arrived, metrics.last_token_time or 0.0)
        request.unfinished.discard(seq_id)
        if not request.unfinished:
            metrics.finished_time = now

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
