"""The objects that routes share, in one `Service` per application."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from fastapi import Request

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import ModelConfig
from glm5.engine.defaults import GenerationDefaults
from glm5.engine.frontend.outputs import Delta
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import EngineInfo, Policy
from glm5.serve.metrics.server_metrics import ServerMetrics
from glm5.serve.service.response_store import ResponseStore
from glm5.serve.service.running import RunningRequests
from glm5.serve.service.state import ServerState

MAX_WEIGHT_NAMES = 1000  # the oldest are dropped: no request runs through so many updates


class Engine(Protocol):
    """The part of `AsyncEngine` that a server needs."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def cfg(self) -> ModelConfig: ...
    @property
    def table(self) -> Sequence[tuple[str, str]]: ...
    @property
    def defaults(self) -> GenerationDefaults: ...
    @property
    def stopped_because(self) -> str | None: ...
    def check(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> None: ...
    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None, **options: Any
    ) -> AbstractAsyncContextManager[AsyncIterator[Delta]]: ...
    def abort(self, request_id: str) -> int: ...
    async def abort_all(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self, level: Literal[1, 2] = 1) -> int: ...
    async def wake_up(self, tags: Sequence[str] | None = None) -> None: ...
    async def update_weights(self, source: str | Path, *, policy: Policy, version: int | None = None) -> int: ...
    async def reset_prefix_cache(self) -> None: ...
    async def profile(self, folder: str | None) -> str | None: ...
    async def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Service:
    """`model_names`: the served names of the model; responses without a requested name have the first. `profile_dir`:
    the folder for profiler traces, or None. `processed_logprobs`: whether log-probabilities are those of the sampling
    distribution where the API does not say which. `tokens_as_ids`: whether they name tokens by their ids unless the
    request says otherwise. `routed_experts`: whether the engine records them."""

    engine: Engine
    template: ChatTemplate
    tokenizer: Tokenizer
    model_names: tuple[str, ...]
    root: str
    state: ServerState
    metrics: ServerMetrics
    profile_dir: str | None = None
    processed_logprobs: bool = False
    tokens_as_ids: bool = False
    routed_experts: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    # Names of unknown request fields that were logged already.
    logged_fields: set[str] = field(default_factory=set)
    running: RunningRequests = field(default_factory=RunningRequests)
    responses: ResponseStore = field(default_factory=ResponseStore)
    _weight_names: dict[int, str] = field(default_factory=dict)

    def weight_name(self, version: int) -> str:
        """The name of a weight version: the one given when it was loaded, else its number."""
        return self._weight_names.get(version, str(version))

    def name_weights(self, version: int, name: str | None) -> None:
        """Set the name of a version that was just loaded; None: its number is its name."""
        self._weight_names.pop(version, None)  # may be left from an engine that has died
        if name is not None:
            self._weight_names[version] = name
        while len(self._weight_names) > MAX_WEIGHT_NAMES:
            del self._weight_names[next(iter(self._weight_names))]


def get_service(request: Request) -> Service:
    """FastAPI dependency: the application's service."""
    return request.app.state.service
