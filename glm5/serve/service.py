"""What the routes work with, one object per application."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.engine.defaults import GenerationDefaults
from glm5.engine.outputs import Delta
from glm5.engine.sampling.params import SamplingParams


class Engine(Protocol):
    """The part of `AsyncEngine` that a server needs."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def defaults(self) -> GenerationDefaults: ...
    @property
    def stopped_because(self) -> str | None: ...
    def check(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> None: ...
    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None, **options: Any
    ) -> AbstractAsyncContextManager[AsyncIterator[Delta]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Service:
    """`model_names`: what requests may call the model; the first is what answers call it."""

    engine: Engine
    template: ChatTemplate
    tokenizer: Tokenizer
    model_names: tuple[str, ...]
    root: str
    created: int = field(default_factory=lambda: int(time.time()))
    # Names of unknown request fields that were logged already.
    logged_fields: set[str] = field(default_factory=set)


def get_service(request: Request) -> Service:
    """FastAPI dependency: the application's service."""
    return request.app.state.service
