"""What a turn costs in the gateway: `python -m tests.support.gateway_scale --episodes 20000`.

A thousand agents at a time, in a process of their own, each with a session and a connection. They ask through OpenAI's
chat API, and go on with what was answered and a new question, for TURNS turns. The engine is scripted. Counted is the
processor time of the process that serves.
"""

import argparse
import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from glm5.chat.template import ChatTemplate
from glm5.common.garbage import settled
from glm5.config.serve import ServeConfig
from glm5.engine.frontend.outputs import Delta, Logprob, Piece
from glm5.serve.app import create_app
from glm5.serve.http.keys import KeyRing
from glm5.serve.http.server import bind, serving
from tests.support.engines import ScriptedEngine
from tests.support.scale import resident_mb, tell
from tests.support.tokenizers import tiny_tokenizer

AGENTS, TURNS, SECONDS = 1000, 8, 0.05
REPLY = "the weather is fine today and tomorrow"
QUESTION = "and what of the day after that, or the next week? " * 4
WINDOW = 4000
"""Turns of which a figure is told."""


class FixedEngine(ScriptedEngine):
    """Gives everybody the same answer, after some time."""

    max_model_len = 1 << 20

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        ids = (*tokenizer.encode("</think>" + REPLY), min(tokenizer.eos_ids))
        stream = tokenizer.stream()
        pieces = tuple(Piece(one, stream.feed(one)) for one in ids[:-1])
        rows = tuple({one: Logprob(-1.0, 1, None, -1.0)} for one in ids)
        values = {"logprobs": rows, "version": 0, "tempered_logprobs": (-1.0,) * len(ids)}
        self._answer = lambda: Delta(ids, pieces, "stop", **values, arrived=time.monotonic())
        self.num_turns = 0

    @asynccontextmanager
    async def generate(self, prompt_ids: Any, params: Any, **_: Any) -> AsyncIterator[Any]:
        yield self._deltas()

    async def _deltas(self) -> AsyncIterator[Delta]:
        await asyncio.sleep(SECONDS)
        self.num_turns += 1
        yield self._answer()


async def request(reader: Any, writer: Any, method: str, path: str, body: bytes) -> bytes:
    fields = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(f"{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
    answered = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert b" 200 " in answered, answered
    length = int(answered.partition(b"content-length:")[2].partition(b"\r\n")[0])
    return await reader.readexactly(length)


async def agents(url: str, episodes: int) -> None:
    parts, numbers = urlsplit(url), iter(range(episodes))

    async def one() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        for number in numbers:
            messages = [{"role": "user", "content": QUESTION}]
            for _ in range(TURNS):
                body = json.dumps({"model": "tiny", "messages": messages}).encode()
                said = await request(reader, writer, "POST", f"/sessions/{number}/v1/chat/completions", body)
                messages += [json.loads(said)["choices"][0]["message"], {"role": "user", "content": QUESTION}]
            shown = json.loads(await request(reader, writer, "DELETE", f"/sessions/{number}", b""))
            assert shown["forks"] == 0
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(AGENTS, episodes)):
            group.create_task(one())


def run_agents(url: str, episodes: int, done: Connection) -> None:
    asyncio.run(agents(url, episodes))
    done.send(None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=20_000)
    args = parser.parse_args()
    logging.getLogger("glm5.serve").setLevel(logging.WARNING)
    tokenizer = tiny_tokenizer()
    engine = FixedEngine(tokenizer)
    config = ServeConfig.model_validate({"model": "org/tiny", "served_model_name": ("tiny",), "max_sessions": 2**20})
    config = config.model_copy(update={"max_queue": 2**16})
    app = create_app(engine, ChatTemplate.bundled("glm-5.2", tokenizer), tokenizer, config, keys=KeyRing([]))
    mine, theirs = get_context("spawn").Pipe()
    costs, memory = list[float](), list[float]()
    with serving(app, engine, bind("127.0.0.1", 0)) as url, settled():
        process = get_context("spawn").Process(target=run_agents, args=(url, args.episodes, theirs))
        process.start()
        began = time.monotonic()
        for window in count(1):
            turns, spent = engine.num_turns, time.process_time()
            while not (ended := mine.poll(0.02) or not process.is_alive()) and engine.num_turns < window * WINDOW:
                pass
            if engine.num_turns > turns:
                costs.append(1e3 * (time.process_time() - spent) / (engine.num_turns - turns))
                memory.append(resident_mb())
            if ended:
                break
        process.join()
    assert engine.num_turns == args.episodes * TURNS, engine.num_turns
    print(f"{args.episodes} episodes of {TURNS} turns, {AGENTS} at a time, in {time.monotonic() - began:.0f} s")
    tell(costs, memory)


if __name__ == "__main__":
    main()
