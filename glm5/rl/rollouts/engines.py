"""The engines that a run's rollouts are sampled from: one or several, each a process of its own on a device.

A group of rollouts has one engine, which the ring chooses (ring.py), so that its prompts find their pages. An engine
that ends or no longer answers is taken out, and what it was asked goes on elsewhere with the tokens that it has given
(policy.py). It is started again in the background, up to `RESTARTS` times, and comes back with the next push: nothing
is asked of an engine whose weights are not those of the last push.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from glm5.checkpoint.handover import TensorStream
from glm5.checkpoint.versions import WeightFiles
from glm5.common.errors import CheckpointError, EngineDead, GlmError
from glm5.config.engine import Channel
from glm5.config.rl import KeyPolicy
from glm5.engine import AsyncEngine
from glm5.rl.rollouts.ring import HashRing

logger = logging.getLogger(__name__)

RESTARTS = 3
"""Times that one engine is started again."""


class Engines:
    """`make(i)` builds engine i of `count`, which has not started. Weights reach them by `channel`, or by `files`. For
    one event loop, but for `start`."""

    def __init__(
        self,
        make: Callable[[int], AsyncEngine],
        count: int = 1,
        *,
        channel: Channel = "auto",
        files: WeightFiles | None = None,
    ) -> None:
        self._make, self.count, self._channel, self._files = make, count, channel, files
        self._all = dict[int, AsyncEngine]()  # that take requests
        self._starting = dict[int, asyncio.Task[AsyncEngine]]()
        self._restarts = [0] * count
        self._ring = HashRing()
        self.num_lost = 0

    def start(self) -> None:
        """Build and start all of them at the same time. One that ends at it is started again later; raises EngineDead
        where all do, and what else building raises."""
        with ThreadPoolExecutor(max(1, self.count)) as threads:
            starting = [threads.submit(self._built, number) for number in range(self.count)]
        failed = [one.exception() for one in starting]
        for number, (one, error) in enumerate(zip(starting, failed, strict=True)):
            if error is None:
                self._join(number, one.result())
            elif isinstance(error, EngineDead):
                logger.warning("engine %d of %d did not start: %s", number, self.count, error)
        wrong = (error for error in failed if error is not None and not isinstance(error, EngineDead))
        if (error := next(wrong, None if self._all else failed[-1])) is not None:
            raise error

    async def close(self) -> None:
        """End all of them, those included that are being started again. Closing again does nothing."""
        begun = await asyncio.gather(*self._starting.values(), return_exceptions=True)
        started = [one for one in begun if isinstance(one, AsyncEngine)]
        await asyncio.gather(*(asyncio.to_thread(engine.close) for engine in [*started, *self._all.values()]))
        if self._files is not None:
            self._files.clear()

    @property
    def alive(self) -> list[AsyncEngine]:
        """Those that take requests. Raises EngineDead where none does."""
        found = [engine for engine in self._all.values() if engine.is_ready]
        if not found:
            raise EngineDead(self.stopped_because or "no engine was started")
        return found

    @property
    def stopped_because(self) -> str | None:
        """Why no engine serves requests, or None while one does."""
        reasons = [engine.stopped_because for engine in self._all.values()]
        return None if None in reasons else next(iter(reasons), "all engines ended")

    @contextmanager
    def held(self, key: int, load: int) -> Iterator[None]:
        """Inside the block, what has this key goes to one engine, and counts as `load` rollouts there."""
        self._of(key, load)
        try:
            yield
        finally:
            self._ring.release(key)

    def of(self, key: int) -> AsyncEngine:
        """The engine of a key. Raises EngineDead where there is none."""
        return self._of(key, 1)

    def _of(self, key: int, load: int) -> AsyncEngine:
        while True:
            try:
                number = self._ring.place(key, load)
            except LookupError:
                raise EngineDead(self.stopped_because or "no engine was started") from None
            engine = self._all[number]
            if engine.is_ready:
                return engine
            self._lose(number)

    def _lose(self, number: int) -> None:
        """Take an engine out, and start another in its place."""
        engine = self._all[number]
        if len(self._all) == 1:
            raise EngineDead(engine.stopped_because or "it ended")
        del self._all[number]
        self._ring.remove(number)
        self.num_lost += 1
        logger.warning(
            "engine %d of %d ended: %s; its requests go on elsewhere", number, self.count, engine.stopped_because
        )
        self._start_again(number, engine)

    def _start_again(self, number: int, ended: AsyncEngine | None = None) -> None:
        if self._restarts[number] < RESTARTS:
            self._restarts[number] += 1
            self._starting[number] = asyncio.create_task(asyncio.to_thread(self._built, number, ended))

    def _built(self, number: int, ended: AsyncEngine | None = None) -> AsyncEngine:
        if ended is not None:
            ended.close()
        engine = self._make(number)
        engine.start()
        return engine

    def _join(self, number: int, engine: AsyncEngine) -> None:
        self._all[number] = engine
        self._ring.add(number)

    async def update_weights(
        self, source: Mapping[str, Tensor] | TensorStream, *, policy: KeyPolicy, version: int, max_key_age: int = 0
    ) -> dict[str, Any]:
        """Push weights into every engine, those included that were started again meanwhile; returns the figures of the
        slowest push. An engine that ends at it is taken out. Raises EngineDead where none is left."""
        began, files = time.monotonic(), self._files
        given = source if files is None else await asyncio.to_thread(files.publish, source, version)
        joining = {number: task for number, task in self._starting.items() if task.done()}
        for number in joining:
            del self._starting[number]
        for number in set(range(self.count)) - {*self._all, *self._starting, *joining}:
            self._start_again(number)
        ready = dict(self._all)
        for number, task in joining.items():
            try:
                ready[number] = task.result()
            except (GlmError, OSError) as error:
                logger.warning("engine %d of %d could not be started again: %s", number, self.count, error)

        async def push(engine: AsyncEngine) -> dict[str, Any]:
            options: Any = {"policy": policy, "version": version, "max_key_age": max_key_age, "channel": self._channel}
            try:
                await engine.update_weights(given, **options)
            except CheckpointError as error:
                if files is None or (whole := await asyncio.to_thread(files.whole)) == given:
                    raise
                logger.warning("%s; all weights are sent", error)
                await engine.update_weights(whole, **options)
            found = (await engine.stats())["last_push"]
            return found if files is None else found | {"seconds": time.monotonic() - began, "bytes": files.num_bytes}

        done = await asyncio.gather(*map(push, ready.values()), return_exceptions=True)
        results = dict(zip(ready, done, strict=True))
        for number in joining:
            if isinstance(results.get(number), dict):
                self._join(number, ready[number])
        for number, found in results.items():
            if isinstance(found, BaseException) and not isinstance(found, EngineDead):
                raise found
            if isinstance(found, EngineDead) and number in self._all:
                self._lose(number)
        if self.count > 1 and policy == "recompute":
            self._ring.rebalance()
        return max((one for one in done if isinstance(one, dict)), key=lambda one: one["seconds"])

    async def usage(self) -> float:
        """The share of the caches' pages that running requests use, of the fullest engine."""
        pages = [one["pages"] for one in await self.stats()]
        return max((one["in_use"] / one["all"] for one in pages), default=0.0)

    async def stats(self) -> list[dict[str, Any]]:
        """Of each engine that answers (engine/core/stats.py)."""
        stats = await asyncio.gather(*(engine.stats() for engine in self.alive), return_exceptions=True)
        return [one for one in stats if not isinstance(one, BaseException)]
