"""The objects that routes share, in one `Service` per application."""

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
from glm5.serve.service.running import RunningRequests
from glm5.serve.service.sessions import Sessions
from glm5.serve.service.shared import OneProcess, Shared
from glm5.serve.service.state import ServerState
from glm5.serve.service.weight_names import WeightNames


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


class ServedEngine(Engine, Protocol):
    """An `Engine` with the limits of the server (`glm5.serve.generation.metered`)."""

    async def reserve(self, num_answers: int) -> None: ...
    def replace(self, engine: Engine) -> None: ...


@dataclass(frozen=True)
class Service:
    """`model_names`: the served names of the model; responses without a requested name have the first. `profile_dir`:
    the folder for profiler traces, or None. `processed_logprobs`: whether log-probabilities are those of the sampling
    distribution where the API does not say which. `tokens_as_ids`: whether they name tokens by their ids unless the
    request says otherwise. `routed_experts`: whether the engine records them. `sampling_masks`: whether trainers get
    them. `only_offered_tools`: whether calls of other tools are text. `sessions`: those of agents, None where the
    server keeps none."""

    engine: ServedEngine
    template: ChatTemplate
    tokenizer: Tokenizer
    model_names: tuple[str, ...]
    root: str
    state: ServerState
    metrics: ServerMetrics
    profile_dir: str | None
    created: int
    processed_logprobs: bool
    tokens_as_ids: bool
    routed_experts: bool
    sampling_masks: bool
    only_offered_tools: bool
    # Lines about what clients send that were logged already.
    logged: set[str] = field(default_factory=set)
    running: RunningRequests = field(default_factory=RunningRequests)
    shared: Shared = field(default_factory=OneProcess)
    sessions: Sessions | None = None
    weight_names: WeightNames = field(default_factory=WeightNames)

    async def abort(self, tenant: str, name: str | None = None) -> int:
        """Abort a tenant's requests of this name, or all of them, in every process of the server. Returns how many."""
        return self.abort_here(tenant, name) + await self.shared.abort_elsewhere(tenant, name)

    def abort_here(self, tenant: str, name: str | None) -> int:
        """Those of this process."""
        return sum(self.engine.abort(engine_id) for engine_id in self.running.find(tenant, name))


async def get_service(request: Request) -> Service:
    """FastAPI dependency: the application's service. FastAPI would run a plain function on another thread."""
    return request.app.state.service
