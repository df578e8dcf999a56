"""`glm5 env serve` by a WebSocket client of the test's own: OpenEnv's messages, wrong ones, frames, bounds.

OpenEnv's own client (openenv 0.10.0 and openenv-core 0.3.0) was tried by hand; docs/log.md says how.
"""

import asyncio
import base64
import hashlib
import json
import os
import socket
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, ClassVar

import pytest

from glm5.common.errors import GlmError
from glm5.config.env import EnvServeConfig
from glm5.rl import openenv
from glm5.rl.environments.play import play
from glm5.rl.environments.protocol import Reply
from glm5.rl.environments.table import make
from glm5.rl.environments.wire import MAX_FRAME
from glm5.rl.openenv import serve

HOSTILE = "tests.unit.rl.hostile:Hostile"
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
KEY = base64.b64encode(b"0123456789abcdef").decode()
HEAD = f"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {KEY}\r\n"


class Client:
    """A WebSocket client that can also send what none should. `opened`: those of a test, which ends them."""

    opened: ClassVar[list["Client"]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> "Client":
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        cls.opened.append(client)
        client.writer.write(f"{HEAD}Sec-WebSocket-Version: 13\r\n\r\n".encode())
        head = (await client.reader.readuntil(b"\r\n\r\n")).decode()
        proof = hashlib.sha1(KEY.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        assert head.startswith("HTTP/1.1 101 ")
        assert f"Sec-WebSocket-Accept: {base64.b64encode(proof).decode()}\r\n" in head
        return client

    def frame(self, kind: int, data: bytes, *, first: int = 128, masked: bool = True) -> None:
        mask, size = os.urandom(4), len(data)
        count = size if size < 126 else 126 if size < 2**16 else 127
        long = b"" if size < 126 else size.to_bytes(2 if size < 2**16 else 8, "big")
        self.writer.write(bytes([first | kind, (128 if masked else 0) | count]) + long)
        self.writer.write(mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)) if masked else data)

    async def receive(self) -> tuple[int, bytes]:
        first, size = await self.reader.readexactly(2)
        assert first & 128
        assert size < 128  # a server does not mask
        if size > 125:
            size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8), "big")
        return first & 15, await self.reader.readexactly(size)

    async def ask(self, kind: str, **data: Any) -> dict:
        message = {"type": kind} if kind in ("state", "close") else {"type": kind, "data": data}
        return await self.say(json.dumps(message))

    async def say(self, text: str) -> dict:
        self.frame(TEXT, text.encode())
        return await self.answer()

    async def answer(self) -> dict:
        kind, data = await self.receive()
        assert kind == TEXT, (kind, data)
        return json.loads(data)

    async def closing(self) -> int:
        """The code with which the server closes."""
        kind, data = await self.receive()
        assert kind == CLOSE, (kind, data)
        assert (await self.reader.read()) == b""  # and nothing after it
        return int.from_bytes(data, "big")


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
            for client in Client.opened:
                client.writer.transport.abort()
            Client.opened.clear()
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
        client.frame(TEXT, b'{"type": "close"}')
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
        "{": ("INVALID_JSON", "Expecting property name"),
        "[" * 100_000: ("INVALID_JSON", "recursion"),
        "[1]": ("VALIDATION_ERROR", "an object with"),
        '{"type": ["x"]}': ("UNKNOWN_TYPE", "allowed: reset, step, state, close"),
        '{"type": "step", "data": {}}': ("EXECUTION_ERROR", "reset first"),
        '{"type": "step"}': ("EXECUTION_ERROR", "reset first"),
        '{"type": "step", "data": {"word": 1}}': ("VALIDATION_ERROR", "word: Extra inputs"),
        '{"type": "step", "data": {"tool_calls": [1]}}': ("VALIDATION_ERROR", "tool_calls.0: Input should"),
        '{"type": "reset", "data": {"seed": -1}}': ("VALIDATION_ERROR", "seed: Input should be greater"),
        '{"type": "reset", "data": {"level": 1}}': ("VALIDATION_ERROR", "level 1; allowed: 0 to 0"),
        '{"type": "reset", "data": 5}': ("VALIDATION_ERROR", "Input should be a valid dictionary"),
    }

    async def test(port: int) -> None:
        client = await Client.to(port)
        for text, (code, said) in wrong.items():
            answer = await client.say(text)
            assert (answer["type"], answer["data"]["code"]) == ("error", code), answer
            assert said in answer["data"]["message"]
        assert (await client.ask("reset"))["type"] == "observation"

    served(test)


def test_faults_of_an_environment_are_named_and_pings_are_answered_meanwhile():
    async def test(port: int) -> None:
        client, other = await Client.to(port), await Client.to(port)
        await client.ask("reset", seed=1)
        failed = (await client.ask("step", content="raise"))["data"]
        assert (failed["code"], failed["message"].partition(":")[0]) == ("EXECUTION_ERROR", "environment")
        await other.ask("reset", seed=1)
        other.frame(TEXT, b'{"type": "step", "data": {"content": "hang"}}')
        other.frame(PING, b"there?")
        assert await other.receive() == (PONG, b"there?")
        assert (await client.ask("reset", seed=2))["type"] == "observation"

    served(test, HOSTILE)


def test_frames():
    async def closed(port: int, *frames: tuple) -> int:
        client = await Client.to(port)
        for kind, data, more in frames:
            client.frame(kind, data, **more)
        return await client.closing()

    async def test(port: int) -> None:
        client = await Client.to(port)
        client.frame(TEXT, b'{"type"', first=0)
        client.frame(PING, b"between")
        client.frame(PONG, b"unasked")
        client.frame(0, b': "state"}')
        assert await client.receive() == (PONG, b"between")
        assert (await client.answer())["type"] == "state"
        padded = await client.say('{"type": "nothing"' + " " * 100_000 + "}")
        assert padded["data"]["code"] == "UNKNOWN_TYPE"
        assert await closed(port, (CLOSE, b"", {})) == 1000
        assert await closed(port, (TEXT, b"{}", {"masked": False})) == 1002
        assert await closed(port, (TEXT, b"{}", {"first": 192})) == 1002
        assert await closed(port, (PING, b"long" * 40, {})) == 1002
        assert await closed(port, (BINARY, b"{}", {})) == 1003
        assert await closed(port, (TEXT, b"\xff", {})) == 1007
        large = await Client.to(port)
        large.writer.write(bytes([129, 255]) + (MAX_FRAME + 1).to_bytes(8, "big"))
        assert await large.closing() == 1009

    served(test)


async def asked(port: int, head: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode())
    try:
        return (await reader.read()).decode()
    except ConnectionError:
        return ""
    finally:
        writer.close()


def test_bounds(monkeypatch):
    async def test(port: int) -> None:
        client = await Client.to(port)
        await client.ask("reset")
        other = await Client.to(port)
        assert (await other.answer())["data"]["code"] == "CAPACITY_REACHED"
        assert await other.closing() == 1000
        assert (await client.answer())["data"] == {"message": "no message for 0.2 s", "code": "SESSION_ERROR"}
        assert await client.closing() == 1000
        assert (await (await Client.to(port)).ask("state"))["type"] == "state"  # there is room again
        assert (await asked(port, "GET /health HTTP/1.1\r\n\r\n")).endswith('{"status": "healthy"}')
        assert "404" in await asked(port, "GET /other HTTP/1.1\r\n\r\n")
        assert "404" in await asked(port, f"{HEAD}Origin: http://evil\r\n\r\n")
        assert await asked(port, "GET /" + "x" * 40_000) == ""
        monkeypatch.setattr(openenv, "HEAD_SECONDS", 0.05)
        assert await asked(port, "GET /heal") == ""

    served(test, max_sessions=1, session_timeout=0.2)


def test_a_server_that_ends_says_nothing_of_its_sessions(caplog):
    async def run(client: socket.socket) -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(EnvServeConfig(name="guess", port=0), port.set_result))
        client.connect(("127.0.0.1", await port))
        client.sendall(f"{HEAD}\r\n".encode())
        assert b"101" in await asyncio.to_thread(client.recv, 1000)
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)

    with socket.socket() as client:
        asyncio.run(run(client))
    assert caplog.text == ""


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(GlmError, match=f"port {port}: .*--port 0 takes any free one"):
            asyncio.run(serve(EnvServeConfig(name="guess", port=port), lambda _: None))
