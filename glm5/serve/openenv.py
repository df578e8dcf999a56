"""`glm5 env serve`: an environment behind the WebSocket of OpenEnv (0.3 and 0.10), for clients that train elsewhere.

    {"type": "reset", "data": {"seed", "level", "episode_id"}}     -> observation: messages, tools
    {"type": "step", "data": {"content", "tool_calls", ...}}       -> observation: messages, seat, rewards
    {"type": "state"}, {"type": "close"}

A connection to /ws is a session with one episode at a time. What a client sends is bounded, and so are sessions, their
idle time and the time of a step; what is wrong is answered by an error, and the session goes on.
"""

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from glm5.config.env import EnvServeConfig
from glm5.rl.environments.protocol import EpisodeFailed, Reply, Turn
from glm5.rl.environments.table import make
from glm5.rl.environments.wire import MAX_FRAME
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.sandbox.choice import choose_backend
from glm5.serve.http.server import Server, bind

END_SECONDS = 1.0  # for steps that run when the server ends


class Message(BaseModel):
    """What a client sends; other keys are ignored."""

    type: str
    data: dict[str, Any] = {}


class Action(BaseModel):
    """What a client steps with: a reply of its model. `metadata` is OpenEnv's, and not read."""

    model_config = ConfigDict(extra="forbid")
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []
    is_truncated: bool = False
    metadata: dict[str, Any] = {}


class Reset(BaseModel):
    """What an episode begins with; OpenEnv ignores other keys. Without a seed it is the server's next task."""

    seed: int | None = Field(None, ge=0, lt=2**62)
    level: int | None = Field(None, ge=0)
    episode_id: str | None = Field(None, max_length=255)


class EnvServer:
    """Sessions of an environment; `app` is its ASGI application."""

    def __init__(self, settings: EnvServeConfig, workers: EnvironmentWorkers) -> None:
        self.settings, self.workers, self.levels = settings, workers, make(settings.name).levels
        self.seeds, self._num_sessions = count(), 0
        health = Route("/health", JSONResponse({"status": "healthy"}))
        self.app = Starlette(routes=[health, WebSocketRoute("/ws", self._serve_session)])

    async def _serve_session(self, socket: WebSocket) -> None:
        if "origin" in socket.headers:  # of a page in a browser, which has no business here
            await socket.close()
            return
        session = _Session(self)
        self._num_sessions += 1
        # The client has gone, or does not read; or the server ends, which uvicorn would log.
        with suppress(WebSocketDisconnect, TimeoutError, asyncio.CancelledError):
            try:
                await socket.accept()
                async for answer in self._answers(socket, session):
                    await asyncio.wait_for(socket.send_text(answer), self.settings.session_timeout)
                await asyncio.wait_for(socket.close(), self.settings.session_timeout)
            finally:
                self._num_sessions -= 1
                await session.end()

    async def _answers(self, socket: WebSocket, session: "_Session") -> AsyncIterator[str]:
        """To each message; at the end of these the connection is closed."""
        most, seconds = self.settings.max_sessions, self.settings.session_timeout
        if self._num_sessions > most:
            yield _error("CAPACITY_REACHED", f"the server has {most} sessions, which is the most")
            return
        while True:
            try:
                message = await asyncio.wait_for(socket.receive(), seconds)
            except TimeoutError:
                yield _error("SESSION_ERROR", f"no message for {seconds:g} s")
                return
            if message["type"] == "websocket.disconnect":
                return
            if (answer := await session.answer(message.get("text", ""))) is None:
                return
            yield answer


class _Session:
    """The episode of a connection."""

    def __init__(self, server: EnvServer) -> None:
        self._server, self._episode = server, None
        self._state: dict[str, Any] = {"episode_id": None, "step_count": 0, "environment": server.settings.name}

    async def answer(self, text: str) -> str | None:
        """To a message; None ends the session."""
        try:
            message = Message.model_validate_json(text)
            match message.type:
                case "reset":
                    return await self._reset(Reset.model_validate(message.data))
                case "step":
                    return await self._step(Action.model_validate(message.data))
                case "state":
                    return json.dumps({"type": "state", "data": self._state})
                case "close":
                    return None
                case kind:
                    return _error("UNKNOWN_TYPE", f"{kind!r:.80}; allowed: reset, step, state, close")
        except ValidationError as error:
            first = error.errors()[0]
            code = "INVALID_JSON" if first["type"] == "json_invalid" else "VALIDATION_ERROR"
            return _error(code, f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": "))
        except EpisodeFailed as failure:
            return _error("EXECUTION_ERROR", f"{failure.kind}: {failure.reason}")

    async def end(self) -> None:
        if self._episode is not None:
            await self._episode.close()

    async def _reset(self, given: Reset) -> str:
        server = self._server
        level = server.settings.level if given.level is None else given.level
        if level >= server.levels:
            return _error("VALIDATION_ERROR", f"level {level}; allowed: 0 to {server.levels - 1}")
        seed = next(server.seeds) if given.seed is None else given.seed
        await self.end()
        task = await server.workers.task(server.settings.name, seed, level)
        self._episode = await server.workers.reset(task)
        self._state |= {"episode_id": given.episode_id, "step_count": 0, "seed": seed, "level": level}
        return _observation(Turn(self._episode.messages), None, tools=list(task.tools))

    async def _step(self, action: Action) -> str:
        if self._episode is None or self._episode.is_closed:
            return _error("EXECUTION_ERROR", "there is no episode, or it has ended; reset first")
        turn = await self._episode.step(Reply(**action.model_dump(exclude={"metadata"})))
        self._state["step_count"] += 1
        return _observation(turn, float(sum(turn.rewards.values())))


def _observation(turn: Turn, reward: float | None, **more: Any) -> str:
    """`reward`: of seat 0; 0 before the end."""
    parts = {"seat": turn.seat, "rewards": dict(turn.rewards), "seat_rewards": list(map(dict, turn.seat_rewards))}
    seen = {"messages": list(turn.messages), **parts, "metrics": dict(turn.metrics), **more}
    return json.dumps({"type": "observation", "data": {"observation": seen, "reward": reward, "done": turn.is_done}})


def _is_told(record: logging.LogRecord) -> bool:
    """Whether uvicorn logs it: not a text that is not UTF-8, after which it closes the connection with 1007."""
    return record.exc_info is None or not isinstance(record.exc_info[1], UnicodeDecodeError)


def _error(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})


async def serve(settings: EnvServeConfig, on_open: Callable[[int], None]) -> None:
    """Serve until SIGTERM, or cancelled. `on_open` is called with the port. Raises ConfigError; OSError if it cannot
    listen."""
    needs_box = bool(make(settings.name).sandbox_levels)
    backend = choose_backend(unsafe_local=settings.unsafe_local) if needs_box else None
    with bind(settings.host, settings.port, settings.session_timeout) as listener:
        async with EnvironmentWorkers([settings.name], num_workers=settings.workers, sandbox=backend) as workers:
            server = Server(EnvServer(settings, workers).app, listener, max_message=MAX_FRAME)
            serving = asyncio.create_task(server.serve())
            # Not by an exception in whatever runs, which uvicorn would take for a session's error.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.begin_stop, END_SECONDS)
            log = logging.getLogger("uvicorn.error")
            log.addFilter(_is_told)
            on_open(listener.getsockname()[1])
            try:
                await asyncio.shield(serving)
            finally:
                server.begin_stop(END_SECONDS)
                await serving
                log.removeFilter(_is_told)
