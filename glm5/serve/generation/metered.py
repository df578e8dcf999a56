"""The engine as the routes see it: measured, limited, kept apart by caller, and replaceable when it has died.

Whatever API a request came through, its prompt is cached under its caller's salt, its tokens are counted, and it ends
in time. The engine behind this may be another one tomorrow (`replace`); requests under way end with the old one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import RequestError
from glm5.config.model import ModelConfig
from glm5.engine.defaults import GenerationDefaults
from glm5.engine.frontend.outputs import Delta
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import Policy
from glm5.serve.http.call import caller, current
from glm5.serve.http.errors import ApiError
from glm5.serve.http.limits import Limits
from glm5.serve.metrics.server_metrics import Measured, ServerMetrics
from glm5.serve.metrics.tracing import Tracing
from glm5.serve.service.service import Engine

logger = logging.getLogger(__name__)

MAX_SHOWN = 10_000  # characters of a prompt in the log, where it is asked for


@dataclass(frozen=True)
class Bounds:
    """What one request may be at most; None is no bound. `seconds`: from the first token asked for to the last."""

    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    seconds: float | None = None


class MeteredEngine:
    """An `Engine` around an engine. `shows` None writes no text to the log; a tokenizer has prompts written there.
    `tracing` None: no traces."""

    def __init__(
        self,
        engine: Engine,
        metrics: ServerMetrics,
        limits: Limits,
        bounds: Bounds | None = None,
        shows: Tokenizer | None = None,
        tracing: Tracing | None = None,
    ):
        self.engine, self.metrics, self.limits = engine, metrics, limits
        self.bounds = bounds or Bounds()
        self._shows, self._tracing = shows, tracing

    def replace(self, engine: Engine) -> None:
        """Another engine answers from now on."""
        self.engine = engine
        self.metrics.restarts.add(1)

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

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
        """The checkpoint's, with answers no longer than allowed."""
        defaults, most = self.engine.defaults, self.bounds.max_output_tokens
        if most is None:
            return defaults
        longest = min(most, defaults.sampling.get("max_tokens", most))
        return replace(defaults, sampling={**defaults.sampling, "max_tokens": longest})

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> None:
        """What `generate` would refuse, and ApiError for what is beyond a limit."""
        bounds = self.bounds
        if bounds.max_prompt_tokens is not None and len(prompt_ids) > bounds.max_prompt_tokens:
            most = f"{bounds.max_prompt_tokens} on this server"
            raise RequestError(f"the prompt has {len(prompt_ids)} tokens; allowed: up to {most}", "prompt")
        if bounds.max_output_tokens is not None and (params.max_tokens or 0) > bounds.max_output_tokens:
            most = f"{bounds.max_output_tokens} on this server"
            raise RequestError(f"max_tokens is {params.max_tokens}; allowed: up to {most}", "max_tokens")
        self.engine.check(prompt_ids, params, **options)
        if (call := current()) is not None and call.places:
            try:
                self.limits.grow(call, params.n)
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
        **options: Any,
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        """As `AsyncEngine.generate`, under the salt of the caller."""
        tenant, reason = caller(), "abort"
        if self._shows is not None:
            logger.info("prompt of %s: %.*r", request_id, MAX_SHOWN, self._shows.decode(prompt_ids))
        asked = self.engine.generate(
            prompt_ids, params, request_id=request_id, cache_salt=tenant.salted(cache_salt), **options
        )
        measured = Measured(self.metrics, tenant.name, len(prompt_ids), params.n)
        traced = self._tracing.request(request_id, params, measured) if self._tracing is not None else nullcontext()
        try:
            async with asked as deltas:
                with traced:
                    yield _Watched(deltas, measured, self.bounds.seconds)
        except Exception:
            reason = "error"
            raise
        finally:
            measured.ended(reason)

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


class _Watched:
    """The deltas of a request, each noted as it passes. Raises ApiError 504 when the request takes too long."""

    def __init__(self, deltas: AsyncIterator[Delta], measured: Measured, seconds: float | None):
        self._deltas, self._measured, self._seconds = deltas, measured, seconds
        self._deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await (anext(self._deltas) if self._deadline is None else self._in_time(self._deadline))
        self._measured.took(delta)
        return delta

    async def _in_time(self, deadline: float) -> Delta:
        try:
            async with asyncio.timeout_at(deadline):
                delta = await anext(self._deltas)
        except TimeoutError:
            delta = None
        # Tokens that were there already are told by no timeout.
        if delta is None or asyncio.get_running_loop().time() > deadline:
            message = f"the answer took longer than the {self._seconds:g} s that this server allows"
            raise ApiError(504, message, code="request_timeout")
        return delta
