"""The engine as the routes see it: with metrics, limits and a cache salt per tenant.

These apply to every request, whatever its API. `replace` swaps the engine after it has died; running requests end with
the old one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import RequestError
from glm5.config.model import ModelConfig
from glm5.engine.async_engine import Deltas
from glm5.engine.defaults import GenerationDefaults
from glm5.engine.frontend.output_stream import NEVER
from glm5.engine.frontend.outputs import Delta
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import EngineInfo, Policy
from glm5.serve.http.call import caller, current
from glm5.serve.http.errors import ApiError
from glm5.serve.http.limits import Admission
from glm5.serve.metrics.server_metrics import RequestMetrics, ServerMetrics
from glm5.serve.metrics.tracing import Tracing
from glm5.serve.service.service import Engine

logger = logging.getLogger(__name__)

MAX_LOGGED = 10_000  # characters of a prompt in the log, with --enable-log-requests


@dataclass(frozen=True)
class Bounds:
    """Limits of one request; None is no limit. `seconds`: for generating all of its tokens. `stream_interval`: the
    fewest tokens of a streamed chunk, but for the first and the last."""

    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    seconds: float | None = None
    stream_interval: int = 1


class MeteredEngine:
    """Wraps an `Engine`. `log_tokenizer`: decodes prompts for the log; None logs no text. `tracing` None: no traces."""

    def __init__(
        self,
        engine: Engine,
        metrics: ServerMetrics,
        admission: Admission,
        bounds: Bounds | None = None,
        log_tokenizer: Tokenizer | None = None,
        tracing: Tracing | None = None,
    ):
        self.engine, self.metrics, self.admission = engine, metrics, admission
        self.bounds = bounds or Bounds()
        self._log_tokenizer, self._tracing = log_tokenizer, tracing

    def replace(self, engine: Engine) -> None:
        """Use another engine from now on."""
        self.engine = engine

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def cfg(self) -> ModelConfig:
        return self.engine.cfg

    @property
    def table(self) -> Sequence[tuple[str, str]]:
        return self.engine.table

    @property
    def stopped_because(self) -> str | None:
        return self.engine.stopped_because

    @property
    def defaults(self) -> GenerationDefaults:
        """The checkpoint's defaults, with max_tokens limited to `max_output_tokens`."""
        defaults, most = self.engine.defaults, self.bounds.max_output_tokens
        if most is None:
            return defaults
        longest = min(most, defaults.sampling.get("max_tokens", most))
        return replace(defaults, sampling={**defaults.sampling, "max_tokens": longest})

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> None:
        """Raises what `generate` would raise, and ApiError for a request beyond a limit."""
        bounds = self.bounds
        if bounds.max_prompt_tokens is not None and len(prompt_ids) > bounds.max_prompt_tokens:
            most = f"{bounds.max_prompt_tokens} on this server"
            raise RequestError(f"the prompt has {len(prompt_ids)} tokens; allowed: up to {most}", "prompt")
        if bounds.max_output_tokens is not None and (params.max_tokens or 0) > bounds.max_output_tokens:
            most = f"{bounds.max_output_tokens} on this server"
            raise RequestError(f"max_tokens is {params.max_tokens}; allowed: up to {most}", "max_tokens")
        self.engine.check(prompt_ids, params, **options)

    async def reserve(self, num_answers: int) -> None:
        """Reserve places for answers of the current request. Raises ApiError if a limit is reached."""
        if (call := current()) is not None and call.places:
            try:
                await self.admission.grow(call, num_answers)
            except ApiError as error:
                self.metrics.refused.add(1, error.code or str(error.status))
                raise

    @asynccontextmanager
    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        streams: bool = True,
        **options: Any,
    ) -> "AsyncIterator[_MeteredDeltas]":
        """`AsyncEngine.generate` with the cache salt of the tenant. Without `streams` an answer has two deltas."""
        tenant, reason = caller(), "abort"
        if self._log_tokenizer is not None:
            logger.info("prompt of %s: %.*r", request_id, MAX_LOGGED, self._log_tokenizer.decode(prompt_ids))
        if (interval := self.bounds.stream_interval if streams else NEVER) > 1:
            options["stream_interval"] = interval
        generation = self.engine.generate(
            prompt_ids,
            params,
            request_id=request_id,
            cache_salt=tenant.salted(cache_salt),
            **options,
        )
        metrics = RequestMetrics(self.metrics, tenant.name, len(prompt_ids), params.n)
        session = call.session if (call := current()) is not None else ""
        tracing = self._tracing
        traced = nullcontext() if tracing is None else tracing.request(request_id, params, metrics, session)
        try:
            async with generation as deltas:
                with traced:
                    yield _MeteredDeltas(deltas, metrics, self.bounds.seconds)
        except Exception:
            reason = "error"
            raise
        finally:
            metrics.ended(reason)

    def abort(self, request_id: str) -> int:
        return self.engine.abort(request_id)

    async def stats(self) -> dict[str, Any]:
        return await self.engine.stats()

    async def pause(self) -> None:
        await self.engine.pause()

    async def resume(self) -> None:
        await self.engine.resume()

    async def abort_all(self) -> None:
        await self.engine.abort_all()

    async def sleep(self, level: Literal[1, 2] = 1) -> int:
        return await self.engine.sleep(level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self.engine.wake_up(tags)

    async def update_weights(self, source: str | Path, *, policy: Policy, version: int | None = None) -> int:
        return await self.engine.update_weights(source, policy=policy, version=version)

    async def reset_prefix_cache(self) -> None:
        await self.engine.reset_prefix_cache()

    async def profile(self, folder: str | None) -> str | None:
        return await self.engine.profile(folder)

    def close(self) -> None:
        self.engine.close()


class _MeteredDeltas:
    """Iterates over a request's deltas and records them. Raises ApiError 504 when the request takes too long."""

    def __init__(self, deltas: AsyncIterator[Delta], metrics: RequestMetrics, seconds: float | None):
        self._deltas, self._metrics, self._seconds = deltas, metrics, seconds
        self._deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def divert(self, accept: Callable[[Delta], bool]) -> None:
        """Give deltas to `accept` as they arrive, if the engine can (`glm5.engine.async_engine.Deltas`)."""

        def metered(delta: Delta) -> bool:
            if is_accepted := accept(delta):
                self._metrics.add(delta)
            return is_accepted

        if isinstance(self._deltas, Deltas):
            self._deltas.divert = metered

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await (anext(self._deltas) if self._deadline is None else self._in_time(self._deadline))
        self._metrics.add(delta)
        return delta

    async def _in_time(self, deadline: float) -> Delta:
        try:
            async with asyncio.timeout_at(deadline):
                delta = await anext(self._deltas)
        except TimeoutError:
            delta = None
        # `timeout_at` does not fire while deltas are available without waiting.
        if delta is None or asyncio.get_running_loop().time() > deadline:
            message = f"the answer took longer than the {self._seconds:g} s that this server allows"
            raise ApiError(504, message, code="request_timeout")
        return delta
