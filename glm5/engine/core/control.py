"""Calls that change the engine as a whole: pause, sleep, weight updates, cache resets. They run one by one, in order.

A call is a generator that is resumed at the start of every iteration, before the next step is planned: it sends
messages to the scheduler, and yields until they have taken effect. Requests continue meanwhile, unless the call stops
them. A GlmError becomes the call's answer; the call has then changed nothing, but for a push that fails midway: weights
of two versions are mixed then, and requests wait until a whole version has arrived.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Protocol

from glm5.common.background import in_background
from glm5.common.errors import CheckpointError, GlmError, RequestError, words_of
from glm5.engine.core.interfaces import Memory, WeightSource
from glm5.engine.core.tiering import Tiering
from glm5.engine.scheduler.messages import Message, Pause, ResetCache, Resume, SetWeights
from glm5.engine.transport.wire import (
    Answer,
    Bucket,
    Part,
    PauseCall,
    PushCall,
    ResetCacheCall,
    ResumeCall,
    SleepCall,
    UpdateWeightsCall,
    WakeCall,
    client_of,
)

Call = PauseCall | ResumeCall | SleepCall | WakeCall | UpdateWeightsCall | PushCall | ResetCacheCall
_Turns = Generator[None, None, dict[str, Any]]


class Engine(Protocol):
    """What a call may do to the engine."""

    @property
    def is_still(self) -> bool:
        """Whether the last plan was paused, with no step unread and no copy under way."""
        ...

    def send_to_scheduler(self, *messages: Message) -> None:
        """Queue messages for the scheduler; the next plan applies them."""
        ...

    def abort(self, seq_ids: tuple[int, ...] | None) -> None:
        """Abort answers (None: all)."""
        ...


class Control:
    """Runs calls. `weights_changed` is called whenever the model's weights may have changed."""

    def __init__(
        self,
        engine: Engine,
        *,
        weights: WeightSource,
        cache: Memory,
        tiering: Tiering | None,
        weights_changed: Callable[[], None],
    ):
        self.engine, self.weights, self.cache, self.tiering = engine, weights, cache, tiering
        self.answers: list[Answer] = []
        self.is_paused = False
        self.level, self.has_cache = 0, True  # 0: the weights are awake
        self.is_torn = False  # a push has written some of its weights, and not all
        self.last_push: dict[str, float] | None = None  # seconds, of which requests were stopped, and bytes
        self._weights_changed = weights_changed
        # Version numbers chosen here are always new, even after a wake has restored older weights.
        self._last_version = weights.version
        self._calls: deque[Call] = deque()
        self._turns: _Turns | None = None
        self._awaited: Future[Any] | None = None
        # Of pushes that are not answered yet, by their ids; a bucket stays until it is answered.
        self._buckets: dict[int, deque[Bucket]] = {}
        self._awaits_bucket_of: int | None = None

    @property
    def is_sleeping(self) -> bool:
        """Memory is released, so nothing can be computed."""
        return self.level > 0 or not self.has_cache

    @property
    def is_busy(self) -> bool:
        """Some calls are not answered yet, and the current one does not wait for a message."""
        awaited = self._awaits_bucket_of
        return bool(self._calls) and (awaited is None or bool(self._buckets[awaited]))

    def add(self, call: Call) -> None:
        self._calls.append(call)
        if isinstance(call, PushCall):
            self._buckets[call.call_id] = deque()

    def add_bucket(self, bucket: Bucket) -> None:
        """What a push goes on with; after its end, only answered."""
        if bucket.push in self._buckets:
            self._buckets[bucket.push].append(bucket)
        else:
            self._refuse(bucket)

    def leave(self, client: int) -> None:
        """A client has ended: its pushes will not go on."""
        for push, buckets in self._buckets.items():
            if client_of(push) == client:
                buckets.append(Bucket(0, push, error="it has ended"))  # 0: nobody asked

    def advance(self) -> None:
        """Resume the current call; when it ends, start the next ones until one has to wait."""
        while self._calls:
            call = self._calls[0]
            if self._turns is None:
                self._turns = self._run(call)
            answer = Answer(call.call_id)
            try:
                next(self._turns)
                return
            except StopIteration as end:
                answer.result = end.value
            except GlmError as error:
                answer.error, answer.kind = words_of(error), type(error).__name__
            self.answers.append(answer)
            self._calls.popleft()
            self._turns = self._awaited = None

    def take_changes(self, *, closely: bool) -> None:
        """Treat new weights that the owner of a shared model has written as an update."""
        if not self.level and not self.is_torn and self.weights.take_changes(self._last_version + 1, closely=closely):
            self._last_version += 1
            self._use_other_weights(recompute=True)

    def wait(self, timeout_s: float) -> None:
        """Wait for the other thread that the current call waits for, at most `timeout_s`."""
        if self._awaited is not None:
            wait([self._awaited], timeout_s)

    def _run(self, call: Call) -> _Turns:
        match call:
            case PauseCall():
                return (yield from self._pause())
            case ResumeCall():
                return self._resume()
            case SleepCall(level=level):
                return (yield from self._sleep(level))
            case WakeCall(parts=parts):
                return self._wake(parts)
            case UpdateWeightsCall():
                return (yield from self._update(call))
            case PushCall():
                return (yield from self._push(call))
            case ResetCacheCall():
                return (yield from self._reset())

    def _pause(self) -> _Turns:
        self.is_paused = True
        if not self.is_sleeping:
            self.engine.send_to_scheduler(Pause())
            yield from self._until_still()
        return {}

    def _resume(self) -> dict[str, Any]:
        if self.is_sleeping:
            raise GlmError("the engine sleeps, so it cannot go on; call wake_up, and then resume if it was paused")
        self.is_paused = False
        self._go_on()
        return {}

    def _go_on(self) -> None:
        """Let requests continue, unless something else stops them."""
        if not (self.is_paused or self.is_sleeping or self.is_torn):
            self.engine.send_to_scheduler(Resume())

    def _sleep(self, level: int) -> _Turns:
        if level <= self.level and not self.has_cache:
            return {"freed_bytes": 0}
        if level == 2:
            self.weights.check_source()
        freed = 0
        if not self.is_sleeping:
            self.engine.send_to_scheduler(Pause(release=True))
            yield from self._until_still()
        if self.has_cache:
            freed += self.cache.release_memory()
            self.has_cache = False
        if level > self.level:
            self.level = level
            freed += self.weights.release(level)
        return {"freed_bytes": freed}

    def _wake(self, parts: Collection[Part]) -> dict[str, Any]:
        """Weights first: if that fails, all stays asleep; if only the cache fails, it alone does."""
        if self.level and "weights" in parts:
            if self.weights.restore():
                self._use_other_weights(recompute=True)
            else:
                self._weights_changed()
            self.is_torn = self.is_torn and self.level == 1  # on level 2 all are read again
            self.level = 0
        if not self.has_cache and "kv_cache" in parts:
            self.cache.restore_memory()
            self.has_cache = True
        self._go_on()
        return {"version": self.weights.version}

    def _update(self, call: UpdateWeightsCall) -> _Turns:
        self._check_update(call)
        began = time.monotonic()
        staged = yield from self._result(self.weights.stage(Path(call.path)))
        self._check_complete(is_complete=not self.is_torn or staged.is_complete)
        read = time.monotonic()
        # Between two launches: the previous step is launched, the next one is not planned yet.
        answer = self._replaced(call, lambda version: self.weights.swap(staged, version))
        now = time.monotonic()
        self.last_push = {"seconds": now - began, "stopped_seconds": now - read, "bytes": staged.num_bytes}
        return answer

    def _push(self, call: PushCall) -> _Turns:
        buckets = self._buckets[call.call_id]
        began, stopped_at = time.monotonic(), None
        try:
            self._check_update(call)
            self._check_complete(is_complete=(yield from self._result(self.weights.prepare(call))))
            checked: Future[None] | None = None
            for number in range(len(call.buckets)):
                bucket = yield from self._next_bucket(call.call_id)
                yield from self._result(checked or self.weights.check_sum(number, bucket.checksum))
                if stopped_at is None:
                    stopped_at = time.monotonic()
                    self.engine.send_to_scheduler(Pause())
                    yield from self._until_still()
                self.is_torn = True
                checked = yield from self._write(number, buckets)
                self.answers.append(Answer(buckets.popleft().call_id))
        except GlmError as error:
            self.weights.end_push(None)
            if not self.is_torn:
                raise
            raise CheckpointError(
                f"{words_of(error)}; the engine holds weights of two versions, and requests wait until a push of all "
                "tensors or a folder with all has arrived"
            ) from error
        finally:
            self._awaits_bucket_of = None
            for bucket in self._buckets.pop(call.call_id):
                self._refuse(bucket)
        answer = self._replaced(call, self.weights.end_push)
        now = time.monotonic()
        num_bytes = sum(tensor.stop - tensor.start for bucket in call.buckets for tensor in bucket)
        self.last_push = {"seconds": now - began, "stopped_seconds": now - (stopped_at or now), "bytes": num_bytes}
        return answer

    def _write(self, number: int, buckets: Sequence[Bucket]) -> "Generator[None, None, Future[None] | None]":
        """Write the first of `buckets`. Meanwhile the next one's bytes are checked, if it has arrived: that future."""
        written, checked = self.weights.write(number), None
        self._awaited = written
        while not written.done():
            if checked is None and len(buckets) > 1 and buckets[1].error is None:
                checked = self.weights.check_sum(number + 1, buckets[1].checksum)
            yield
        yield from self._result(written)
        return checked

    def _next_bucket(self, push: int) -> Generator[None, None, Bucket]:
        buckets = self._buckets[push]
        self._awaits_bucket_of = push
        while not buckets:
            yield
        self._awaits_bucket_of = None
        if (error := buckets[0].error) is not None:
            raise CheckpointError(f"the sender of the weights stopped: {error}")
        return buckets[0]

    def _refuse(self, bucket: Bucket) -> None:
        self.answers.append(Answer(bucket.call_id, error="the push has ended", kind=CheckpointError.__name__))

    def _check_update(self, call: UpdateWeightsCall | PushCall) -> None:
        if self.level:
            raise GlmError(
                "the engine sleeps, so its weights cannot be replaced; call wake_up(tags=['weights']), update_weights, "
                "and then wake_up(tags=['kv_cache'])"
            )
        if call.version is not None and call.version <= self._last_version:
            raise RequestError(f"version is {call.version}; allowed: more than {self._last_version}", param="version")

    def _check_complete(self, *, is_complete: bool) -> None:
        if self.is_torn and not is_complete:
            raise CheckpointError("the update has only some tensors of the model, and an earlier one has failed midway")

    def _replaced(self, call: UpdateWeightsCall | PushCall, replace: Callable[[int], None]) -> dict[str, Any]:
        """Replace the weights, with their new version, as the last part of a call."""
        if call.policy == "abort":
            self.engine.abort(None)
        version = self._last_version + 1 if call.version is None else call.version
        self._last_version = version
        replace(version)
        age = call.max_key_age if call.policy == "keep-session" else 0
        self._use_other_weights(recompute=call.policy != "keep", max_key_age=age)
        if self.is_torn:
            self.is_torn = False
            self._go_on()
        return {"version": version}

    def _use_other_weights(self, *, recompute: bool, max_key_age: int = 0) -> None:
        self._weights_changed()
        version, identity = self.weights.version, self.weights.identity
        self.engine.send_to_scheduler(SetWeights(version, recompute, identity, max_key_age))

    def _reset(self) -> _Turns:
        self.engine.send_to_scheduler(ResetCache())
        if self.tiering is not None:
            self.tiering.cancel_stores()
            yield
            while self.tiering.has_stores:
                yield
            yield from self._result(in_background(self.tiering.clear, "glm5-clear"))
        return {}

    def _until_still(self) -> Generator[None, None, None]:
        yield
        while not self.engine.is_still:
            yield

    def _result(self, future: "Future[Any]") -> Generator[None, None, Any]:
        """Wait for the result of another thread; every error is raised as a GlmError."""
        self._awaited = future
        while not future.done():
            yield
        self._awaited = None
        try:
            return future.result()
        except GlmError:
            raise
        except Exception as error:
            raise GlmError(f"{type(error).__name__}: {error}") from error
