"""A server class for Ray Serve's LLM API, written for Ray 2.60: LLMConfig's server_cls is `Glm5Server`.

Ray's ingress passes OpenAI's requests to `chat` and `completions` of a replica; here each is one request to glm5's own
application, so that a replica answers as `glm5 serve` does. With direct streaming, Ray serves that application itself.
The replica's process starts the engine's processes, one for each GPU, so it holds all of their GPUs.
"""

import asyncio
import copy
import importlib
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import suppress
from typing import Any

from glm5.chat.template import ChatTemplate
from glm5.common.errors import EngineDead, MissingExtra
from glm5.config.serve import ServeConfig
from glm5.engine.async_engine import AsyncEngine
from glm5.serve.app import create_app

MODELS = "ray.serve.llm.openai_api_models"  # OpenAI's answers as classes, by which Ray's ingress tells them apart

Message = MutableMapping[str, Any]


class Glm5Server:
    """A replica. `engine_kwargs` of the config: keywords of `AsyncEngine`."""

    def __init__(self, llm_config: Any):
        self._llm_config = llm_config
        self._engine: AsyncEngine | None = None
        self._app: Any = None
        self._is_paused = False

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """The options of the user, and the GPUs of the engine unless the user says how many."""
        options = copy.deepcopy(dict(llm_config.deployment_config))
        actor = options.setdefault("ray_actor_options", {})
        actor.setdefault("num_gpus", llm_config.engine_kwargs.get("tensor_parallel_size", 1))
        return options

    async def start(self) -> None:
        """Load the model. Ray calls this once, before any request."""
        if self._engine is not None:
            return
        loading = self._llm_config.model_loading_config
        source = loading.model_source if isinstance(loading.model_source, str) else loading.model_id
        keywords = self._llm_config.engine_kwargs
        engine = await asyncio.to_thread(lambda: AsyncEngine(source, **keywords))
        engine.start()
        llm = engine.llm
        assert llm.tokenizer is not None
        template = ChatTemplate.for_checkpoint(llm.path, "shared" in llm.cfg.indexer_types, None, llm.tokenizer)
        # Ray's proxies are in front, and know callers and host names.
        config = ServeConfig(model=source, served_model_name=(loading.model_id,), allowed_hosts=("*",))
        self._app, self._engine = create_app(engine, template, llm.tokenizer, config), engine

    async def check_health(self) -> None:
        """Raises EngineDead when the engine has died; Ray then replaces the replica."""
        if (reason := self._running().stopped_because) is not None:
            raise EngineDead(reason)

    async def __serve_build_asgi_app__(self) -> Any:
        """The application, for Ray's direct streaming."""
        await self.start()
        return self._app

    async def llm_config(self) -> Any:
        return self._llm_config

    def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """The answer to a chat completion, or the events of its stream as texts."""
        return self._ask("/v1/chat/completions", request, raw_request_info, "ChatCompletionResponse")

    def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """The same for a completion."""
        return self._ask("/v1/completions", request, raw_request_info, "CompletionResponse")

    def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return self._ask("/tokenize", request, raw_request_info, "TokenizeResponse")

    def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return self._ask("/detokenize", request, raw_request_info, "DetokenizeResponse")

    async def reset_prefix_cache(self) -> None:
        await self._running().reset_prefix_cache()

    async def sleep(self, level: int = 1, **_: Any) -> None:
        await self._running().sleep(2 if level == 2 else 1)

    async def wakeup(self, tags: list[str] | None = None, **_: Any) -> None:
        await self._running().wake_up(tags)

    async def is_sleeping(self) -> bool:
        return (await self._running().stats())["is_sleeping"]

    async def pause(self, **_: Any) -> None:
        await self._running().pause()

    async def resume(self, **_: Any) -> None:
        await self._running().resume()

    async def is_paused(self) -> bool:
        return (await self._running().stats())["is_paused"]

    def __del__(self) -> None:
        # Ray calls it when a replica ends.
        if self._engine is not None:
            self._engine.close()

    def _running(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineDead("the engine is not started")
        return self._engine

    async def _ask(self, path: str, request: Any, raw: Any, answer: str) -> AsyncIterator[Any]:
        """Send a request to the application; yields one answer or error in Ray's classes, or the texts of a stream."""
        self._running()
        body = json.dumps(request.model_dump(mode="json", exclude_unset=True, exclude_none=True)).encode()
        pieces = _Exchange(self._app, path, body, {} if raw is None else raw.headers)
        async with pieces:
            status, is_stream = await pieces.begin()
            if is_stream:
                async for piece in pieces:
                    yield piece.decode()
                return
            content = json.loads(b"".join([piece async for piece in pieces]))
        models = _models()
        if status == 200:
            yield getattr(models, answer)(**content)
        else:
            error = content["error"]
            info = {"message": error["message"], "type": error["type"], "code": status, "param": error.get("param")}
            yield models.ErrorResponse(error=models.ErrorInfo(**info))


class _Exchange:
    """One POST request to an ASGI application, whose answer is read in pieces; leaving the block ends it."""

    def __init__(self, app: Any, path: str, body: bytes, headers: MutableMapping[str, str]):
        kept = {name.lower(): value for name, value in headers.items() if name.lower() in _PASSED}
        kept |= {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode("latin-1", "replace")) for name, value in kept.items()],
            "client": ("127.0.0.1", 0),
            "server": ("localhost", 80),
            "state": {},
        }
        self._app, self._requests = app, [{"type": "http.request", "body": body, "more_body": False}]
        self._answers: asyncio.Queue[Message | None] = asyncio.Queue()

    async def __aenter__(self) -> "_Exchange":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def begin(self) -> tuple[int, bool]:
        """The status, and whether the answer is a stream of events."""
        start = await self._answers.get()
        if start is None:
            await self._task
            raise EngineDead("the application has not answered")
        kinds = [value for name, value in start["headers"] if name.lower() == b"content-type"]
        return start["status"], any(kind.startswith(b"text/event-stream") for kind in kinds)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._answers.get()) is not None:
            if message.get("body"):
                yield message["body"]

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._answers.put)
        finally:
            self._answers.put_nowait(None)

    async def _receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await asyncio.Event().wait()  # the client stays until the block is left
        raise AssertionError


_PASSED = frozenset({"x-request-id", "x-session-id", "traceparent", "user-agent"})


def _models() -> Any:
    try:
        return importlib.import_module(MODELS)
    except ImportError as error:
        raise MissingExtra("this needs the package 'ray': run  pip install 'ray[llm]'", name=MODELS) from error
