"""`glm5 env serve` by a client of the library `websockets`: OpenEnv's messages, wrong ones, bounds, the end.

OpenEnv's own client (openenv 0.10.0 and openenv-core 0.3.0) was tried by hand; docs/log.md says how.
"""

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from glm5.cli import env_serve
from glm5.cli.main import main
from glm5.config.env import EnvServeConfig
from glm5.rl.environments.play import play
from glm5.rl.environments.protocol import Reply
from glm5.rl.environments.table import make
from glm5.rl.environments.wire import MAX_FRAME
from glm5.serve import openenv
from glm5.serve.http.server import Server
from glm5.serve.openenv import serve

HOSTILE = "tests.unit.rl.hostile:Hostile"


class Client:
    """A client of the library, which can also send what none should."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    @classmethod
    async def to(cls, port: int, **more: Any) -> "Client":
        return cls(await connect(f"ws://127.0.0.1:{port}/ws", proxy=None, close_timeout=0.1, **more))

    async def ask(self, kind: str, **data: Any) -> dict:
        message = {"type": kind} if kind in ("state", "close") else {"type": kind, "data": data}
        return await self.say(json.dumps(message))

    async def say(self, text: str | bytes) -> dict:
        await self.socket.send(text)
        return await self.answer()

    async def answer(self) -> dict:
        return json.loads(await self.socket.recv())

    async def closing(self) -> int:
        """The code with which the server closes."""
        with pytest.raises(ConnectionClosed) as caught:
            await self.socket.recv()
        assert caught.value.rcvd is not None
        return caught.value.rcvd.code


def served(test: Callable[[int], Coroutine[Any, Any, None]], name: str = "guess", **more: Any) -> None:
    """Runs a test beside a server, with its port."""

    async def run() -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(EnvServeConfig(name=name, port=0, **more), port.set_result))
        await asyncio.wait([server, port], return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            server.result()
        try:
            await asyncio.wait_for(test(await port), 60)
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)

    asyncio.run(run())


def test_episodes_are_those_of_the_environment():
    guess, random = make("guess"), Random(20261128)
    print("seed 20261128")

    async def test(port: int) -> None:
        client = await Client.to(port)
        for seed in range(30):
            task = guess.task(seed, 0)
            begun = await client.ask("reset", seed=seed, episode_id=f"e{seed}", unknown=1)
            assert (begun["type"], begun["data"]["reward"], begun["data"]["done"]) == ("observation", None, False)
            assert begun["data"]["observation"]["messages"] == list(task.messages)
            replies, done, answer = list[str](), False, {}
            while not done:
                replies.append(str(random.randint(1, 15)))
                answer = (await client.ask("step", content=replies[-1], metadata={}))["data"]
                done = answer["done"]
            said = iter(replies)
            last = play(guess, task, lambda _: Reply(next(said))).last  # noqa: B023
            seen = answer["observation"]
            assert (seen["rewards"], seen["metrics"]) == (last.rewards, last.metrics)
            assert answer["reward"] == sum(last.rewards.values())
            state = {
                "episode_id": f"e{seed}",
                "step_count": len(replies),
                "environment": "guess",
                "seed": seed,
                "level": 0,
            }
            assert await client.ask("state") == {"type": "state", "data": state}
        await client.socket.send('{"type": "close"}')
        assert await client.closing() == 1000

    served(test)


def test_tools_and_seats_are_told():
    async def tools(port: int) -> None:
        client = await Client.to(port)
        task = make("tools").task(4, 0)
        begun = (await client.ask("reset", seed=4))["data"]["observation"]
        assert begun["tools"] == list(task.tools)
        (call,) = task.data["calls"]
        answer = (await client.ask("step", tool_calls=[call]))["data"]
        assert (answer["reward"], answer["observation"]["messages"][0]["role"]) == (0.0, "tool")
        answer = (await client.ask("step", tool_calls=[{}, {"function": []}]))["data"]
        assert all(one["content"].startswith("error: ") for one in answer["observation"]["messages"])

    async def seats(port: int) -> None:
        client = await Client.to(port)
        for seed in range(2):  # without one, the next task
            await client.ask("reset")
            assert (await client.ask("state"))["data"]["seed"] == seed
        assert (await client.ask("step", content="bet"))["data"]["observation"]["seat"] == 1
        end = (await client.ask("step", content="pass"))["data"]
        assert (end["done"], end["reward"], end["observation"]["seat_rewards"]) == (True, 1.0, [{"won": -1.0}])

    served(tools, "tools")
    served(seats, "kuhn")


def test_what_is_wrong_is_answered_and_the_session_goes_on():
    wrong = {
        "{": ("INVALID_JSON", "Invalid JSON: EOF"),
        "[" * 100_000: ("INVALID_JSON", "recursion"),
        b"\xff": ("INVALID_JSON", "EOF"),
        "[1]": ("VALIDATION_ERROR", "an object"),
        '{"kind": "reset"}': ("VALIDATION_ERROR", "type: Field required"),
        '{"type": ["x"]}': ("VALIDATION_ERROR", "type: Input should be a valid string"),
        '{"type": "x"}': ("UNKNOWN_TYPE", "'x'; allowed: reset, step, state, close"),
        '{"type": "step", "data": {}}': ("EXECUTION_ERROR", "reset first"),
        '{"type": "step"}': ("EXECUTION_ERROR", "reset first"),
        '{"type": "step", "data": {"word": 1}}': ("VALIDATION_ERROR", "word: Extra inputs"),
        '{"type": "step", "data": {"tool_calls": [1]}}': ("VALIDATION_ERROR", "tool_calls.0: Input should"),
        '{"type": "reset", "data": {"seed": -1}}': ("VALIDATION_ERROR", "seed: Input should be greater"),
        '{"type": "reset", "data": {"level": 1}}': ("VALIDATION_ERROR", "level 1; allowed: 0 to 0"),
        '{"type": "reset", "data": 5}': ("VALIDATION_ERROR", "data: Input should be an object"),
    }

    async def test(port: int) -> None:
        client = await Client.to(port)
        for text, (code, said) in wrong.items():
            answer = await client.say(text)
            assert (answer["type"], answer["data"]["code"]) == ("error", code), answer
            assert said in answer["data"]["message"]
        assert (await client.ask("reset"))["type"] == "observation"

    served(test)


def test_text_that_is_none_closes_its_connection_alone(caplog):
    async def test(port: int) -> None:
        client, other = await Client.to(port), await Client.to(port)
        await client.socket.send(b'{"type": "\xff"}', text=True)
        assert await client.closing() == 1007
        assert (await other.ask("reset"))["type"] == "observation"

    served(test)
    assert caplog.messages == []


def test_faults_of_an_environment_are_named_and_pings_are_answered_meanwhile():
    async def test(port: int) -> None:
        client, other = await Client.to(port), await Client.to(port)
        await client.ask("reset", seed=1)
        failed = (await client.ask("step", content="raise"))["data"]
        assert (failed["code"], failed["message"].partition(":")[0]) == ("EXECUTION_ERROR", "environment")
        await other.ask("reset", seed=1)
        await other.socket.send('{"type": "step", "data": {"content": "hang"}}')
        await (await other.socket.ping())
        assert (await client.ask("reset", seed=2))["type"] == "observation"

    served(test, HOSTILE)


async def asked(port: int, head: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode())
    try:
        return (await reader.read()).decode()
    except ConnectionError:
        return ""
    finally:
        writer.close()


def test_bounds():
    async def test(port: int) -> None:
        client = await Client.to(port)
        await client.ask("reset")
        other = await Client.to(port)
        assert (await other.answer())["data"]["code"] == "CAPACITY_REACHED"
        assert await other.closing() == 1000
        assert (await client.answer())["data"] == {"message": "no message for 2 s", "code": "SESSION_ERROR"}
        assert await client.closing() == 1000
        assert (await (await Client.to(port)).ask("state"))["type"] == "state"  # there is room again

    served(test, max_sessions=1, session_timeout=2)


def test_what_is_too_large_or_no_session(monkeypatch):
    monkeypatch.setattr(openenv, "Server", partial(Server, client_timeout=0.1))
    upgrade = "GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"

    async def test(port: int) -> None:
        for parts in (["{}".ljust(MAX_FRAME + 1)], ["{}".ljust(MAX_FRAME // 2), " " * (MAX_FRAME // 2 + 1)]):
            client = await Client.to(port)
            with suppress(ConnectionClosed):  # while it sends
                await client.socket.send(parts)
            assert await client.closing() == 1009
        client = await Client.to(port)
        assert (await client.say('{"type": "state"}'.ljust(MAX_FRAME)))["type"] == "state"
        health = await asked(port, "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert health.endswith('{"status":"healthy"}')
        assert "HTTP/1.1 404" in await asked(port, "GET /ws HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with pytest.raises(InvalidStatus, match="403"):
            await Client.to(port, origin="http://evil")
        assert "HTTP/1.1 400" in await asked(port, upgrade + "\r\n")
        # More than the library takes: it says nothing, and the connection must not stay.
        assert await asked(port, upgrade + key + "X: y\r\n" * 130 + "\r\n") == ""
        assert "HTTP/1.1 408" in await asked(port, "GET /heal")
        assert (await client.ask("state"))["type"] == "state"  # that time is not a session's

    served(test)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command(number, code, monkeypatch):
    monkeypatch.setattr(env_serve, "out", lambda *_, **__: signal.raise_signal(number))
    assert main(["env", "serve", "guess", "--port", "0"]) == code


def test_sessions_are_told_that_the_server_ends(caplog):
    async def test(port: int) -> None:
        idle, busy = await Client.to(port), await Client.to(port)
        await busy.ask("reset", seed=1)
        await busy.socket.send('{"type": "step", "data": {"content": "hang"}}')
        await (await busy.socket.ping())
        signal.raise_signal(signal.SIGTERM)
        assert [await idle.closing(), await busy.closing()] == [1012, 1012]

    served(test, HOSTILE)
    assert [line for line in caplog.messages if "Cancel 1 running" not in line] == []


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}: .*choose another --port, or 0 for a free one"):
            asyncio.run(serve(EnvServeConfig(name="guess", port=port), lambda _: None))
