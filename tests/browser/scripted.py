"""A server that shows the pages and says what a test wrote down, byte by byte."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from glm5.serve.page import pages

EMPTY = "/page/icon.svg"  # where nothing runs, and a page of this server may forget what it stored
MODELS = [{"id": "glm-5-nano", "max_model_len": 4096}, {"id": "other", "max_model_len": 1024}]

SAMPLING = {"temperature": 0.7, "max_tokens": 2048}


class Gate:
    """A place in a stream that waits until the test opens it."""

    def __init__(self):
        self._loop, self._open = None, asyncio.Event()
        self.reached = threading.Event()

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached.set()
        await self._open.wait()

    def open(self, timeout: float = 20) -> None:
        assert self.reached.wait(timeout), "the stream never came to this place"
        self._loop.call_soon_threadsafe(self._open.set)


@dataclass
class Answer:
    """`parts`: bytes, each sent by itself, and gates. `left` is set when the client goes before the end."""

    parts: Sequence[bytes | Gate] = ()
    refusal: Response | None = None
    left: threading.Event = field(default_factory=threading.Event)


@dataclass
class Script:
    """What the server does. Requests for answers take `answers` in turn, and are kept in `requests`."""

    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    needed_key: str | None = None
    metrics: list[str | None] = field(default_factory=list)  # the last one stays; None: the server fails
    num_polls: int = 0


def create_app(script: Script) -> FastAPI:
    """The application; it looks at `script` at every request."""
    app = FastAPI()
    app.include_router(pages.router)

    @app.middleware("http")
    async def check_key(request: Request, go_on: Any) -> Response:
        if request.url.path in ("/v1/models", "/metrics"):
            script.keys.append(request.headers.get("Authorization"))
            if script.needed_key and script.keys[-1] != f"Bearer {script.needed_key}":
                return refusal(401, "a valid API key is needed", code="invalid_api_key")
        return await go_on(request)

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": MODELS}

    @app.get("/get_model_info")
    async def model_info() -> Any:
        return {"preferred_sampling_params": json.dumps(SAMPLING)}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        script.requests.append(await request.json())
        answer = script.answers.pop(0)
        return answer.refusal or StreamingResponse(_sent(answer), media_type="text/event-stream")

    @app.get("/metrics")
    async def metrics() -> Response:
        text = script.metrics[min(script.num_polls, len(script.metrics) - 1)]
        script.num_polls += 1
        return PlainTextResponse(text) if text is not None else refusal(503, "gone")

    return app


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """Serve on a thread while the block runs; gives the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        # The listener queues whoever comes before the server takes them.
        thread = threading.Thread(target=server.run, args=([listener],), name="scripted-server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


async def _sent(answer: Answer) -> AsyncIterator[bytes]:
    try:
        for part in answer.parts:
            if isinstance(part, Gate):
                await part.wait()
            else:
                yield part
    except (asyncio.CancelledError, GeneratorExit):
        answer.left.set()
        raise


def refusal(status: int, message: str, **fields: Any) -> Response:
    """An error in OpenAI's envelope."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None, **fields}}, status)


def event(content: Any) -> bytes:
    """An event of a stream."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def delta(finish_reason: str | None = None, **content: Any) -> bytes:
    """A chunk of an answer."""
    return event({"choices": [{"index": 0, "delta": content, "finish_reason": finish_reason}]})


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    """The last chunk."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}})


DONE = b"data: [DONE]\n\n"


def said(text: str, reasoning: str = "") -> Answer:
    """A whole answer with usage."""
    thought = [delta(reasoning_content=reasoning)] if reasoning else []
    return Answer([*thought, delta(content=text), delta("stop"), usage(12, 34), DONE])
