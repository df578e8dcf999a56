"""`glm5 env serve`: an environment behind the WebSocket of OpenEnv (0.3 and 0.10), for clients that train elsewhere.

    {"type": "reset", "data": {"seed", "level", "episode_id"}}     -> observation: messages, tools
    {"type": "step", "data": {"content", "tool_calls", ...}}       -> observation: messages, seat, rewards
    {"type": "state"}, {"type": "close"}

A connection to /ws is a session with one episode at a time. What a client sends is bounded, and so are sessions, their
idle time and the time of a step; what is wrong is answered by an error, and the session goes on.
"""

import asyncio
import json
from collections.abc import Callable
from itertools import count
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5.common.errors import GlmError
from glm5.common.websocket import WebSocket
from glm5.config.env import EnvServeConfig
from glm5.rl.environments.protocol import EpisodeFailed, Reply, Turn
from glm5.rl.environments.table import make
from glm5.rl.environments.wire import MAX_FRAME
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.sandbox.choice import choose_backend

MAX_HEAD, HEAD_SECONDS = 2**14, 10.0
"""Bytes of a request, and time for it."""


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
    """Sessions of an environment; `handle` is given each connection."""

    def __init__(self, settings: EnvServeConfig, workers: EnvironmentWorkers) -> None:
        self.settings, self.workers, self.levels = settings, workers, make(settings.name).levels
        self.seeds, self._num_sessions = count(), 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer GET /health, or hold a session on /ws."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            pairs = (line.partition(":") for line in head[1:])
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            key = headers.get("sec-websocket-key")
            if head[0].startswith(("GET /ws ", "GET /ws?")) and key is not None and "origin" not in headers:
                await self._session(WebSocket(reader, writer, key, MAX_FRAME))
                return
            # A page of a browser, which names its origin, has no business here.
            is_health = head[0].startswith("GET /health ")
            status, body = ("200 OK", '{"status": "healthy"}') if is_health else ("404 Not Found", "{}")
            writer.write(f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: ".encode())
            writer.write(f"{len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # TimeoutError is an OSError
            writer.transport.abort()
        except asyncio.CancelledError:
            pass  # the server ends; asyncio would log it
        finally:
            writer.close()

    async def _session(self, socket: WebSocket) -> None:
        session, most, seconds = _Session(self), self.settings.max_sessions, self.settings.session_timeout
        self._num_sessions += 1
        try:
            if self._num_sessions > most:
                await socket.send(_error("CAPACITY_REACHED", f"the server has {most} sessions, which is the most"))
                return
            while True:
                try:
                    message = await asyncio.wait_for(socket.receive(), seconds)
                except TimeoutError:
                    await socket.send(_error("SESSION_ERROR", f"no message for {seconds:g} s"))
                    return
                if message is None or (answer := await session.answer(message)) is None:
                    return
                await asyncio.wait_for(socket.send(answer), seconds)
        finally:
            self._num_sessions -= 1
            socket.close()
            await session.end()


class _Session:
    """The episode of a connection."""

    def __init__(self, server: EnvServer) -> None:
        self._server, self._episode = server, None
        self._state: dict[str, Any] = {"episode_id": None, "step_count": 0, "environment": server.settings.name}

    async def answer(self, text: str) -> str | None:
        """To a message; None ends the session."""
        try:
            message = json.loads(text)
            kind, data = message["type"], message.get("data", {})
        except (ValueError, RecursionError) as error:
            return _error("INVALID_JSON", f"Invalid JSON: {error}")
        except (TypeError, KeyError, AttributeError):
            return _error("VALIDATION_ERROR", 'a message must be an object with "type"')
        try:
            match kind:
                case "reset":
                    return await self._reset(Reset.model_validate(data))
                case "step":
                    return await self._step(Action.model_validate(data))
                case "state":
                    return json.dumps({"type": "state", "data": self._state})
                case "close":
                    return None
                case _:
                    return _error("UNKNOWN_TYPE", f"{kind!r:.80}; allowed: reset, step, state, close")
        except ValidationError as error:
            first = error.errors()[0]
            return _error("VALIDATION_ERROR", f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
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


def _error(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})


async def serve(settings: EnvServeConfig, on_open: Callable[[int], None]) -> None:
    """Serve until cancelled. `on_open` is called with the port. Raises ConfigError, GlmError."""
    needs_box = bool(make(settings.name).sandbox_levels)
    backend = choose_backend(unsafe_local=settings.unsafe_local) if needs_box else None
    async with EnvironmentWorkers([settings.name], num_workers=settings.workers, sandbox=backend) as workers:
        handle = EnvServer(settings, workers).handle
        try:
            server = await asyncio.start_server(handle, settings.host, settings.port, limit=MAX_HEAD)
        except OSError as error:
            reason = error.strerror or error
            raise GlmError(f"{settings.host}, port {settings.port}: {reason}; --port 0 takes any free one") from None
        on_open(server.sockets[0].getsockname()[1])
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
