"""What a thousand rollouts at once cost the process that conducts them: `python -m tests.support.scale [--gateway]`.

Dispatcher, sink, harness, the routing of 16 engines and the environment's worker are the real ones, and so are the
clients of the engines. Those are 16 processes that compute nothing: each answers every request after `SECONDS` with the
same reply. With `--gateway` an episode is an agent, in one other process with all agents, that asks the gateway `TURNS`
times through OpenAI's chat API, each time with all that was said. Processor time a turn is that of the conducting
process, gateway included; memory is what it has at the end of each tenth of the episodes.
"""

import argparse
import asyncio
import json
import logging
import resource
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from glm5.common.garbage import settled
from glm5.config.engine import EngineConfig
from glm5.config.rl import RLRecipe
from glm5.engine import AsyncEngine
from glm5.engine.joined import JoinedLLM
from glm5.engine.transport.link import ProcessLink
from glm5.engine.transport.wire import Start
from glm5.rl.build import PolicyBuilder
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.orchestrator.rollouts import AsyncRollouts
from glm5.rl.rollouts.engines import Engines
from glm5.rl.rollouts.harness import Harness
from glm5.rl.rollouts.policy import Policy
from glm5.rl.rollouts.program import ProgramHarness
from glm5.rl.services import ServiceSettings
from glm5.serve.gateway import gateway
from tests.support.rl_recipe import small_recipe

SECONDS = 0.5
CONCURRENT, GROUP, ENGINES = 1024, 16, 16
TURNS = 4
QUESTION = "and what of the day after that, or the next week? " * 4
LEAST_LEAK = 1000
"""Bytes an episode. The smallest thing that an episode could leave is its tokens: with the gateway about 4 x 250 new
ones, 8 bytes each in a list, without it 16 or so beside a dozen objects of 64 bytes and more, which is 1 kB."""


class AskingHarness(ProgramHarness):
    """Plays episodes by the agents of another process, which listen at `path`: a thousand programs do not fit here."""

    path: str

    async def _run(self, url: str, messages: Any) -> str:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(json.dumps([url, self._gateway.key, list(messages)]).encode() + b"\n")
        said = await reader.readline()
        writer.close()
        return said.decode().strip()


def run_agents(path: str) -> None:
    asyncio.run(serve_agents(path))


async def serve_agents(path: str) -> None:
    playing = set[Any]()  # asyncio itself forgets those whose harness has left

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One episode, which the end of the run may cut off."""
        playing.add(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await play(reader, writer)
        playing.discard(asyncio.current_task())

    async with await asyncio.start_unix_server(agent, path, limit=1 << 20, backlog=CONCURRENT) as server:
        await server.serve_forever()


async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if not (line := await reader.readline()):
        return
    url, key, messages = json.loads(line)
    parts = urlsplit(url)
    asked, answered = await asyncio.open_connection(parts.hostname, parts.port)
    said = ""
    for _ in range(TURNS):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        fields = f"host: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json"
        head = f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\n{fields}\r\ncontent-length: {len(body)}\r\n\r\n"
        answered.write(head.encode() + body)
        head = (await asked.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        content = await asked.readexactly(length)
        if b" 200 " not in head:  # what the harness finds missing, unless it has cancelled the episode
            break
        message = json.loads(content)["choices"][0]["message"]
        said = message["content"] or ""
        messages += [message, {"role": "user", "content": QUESTION}]
    answered.close()
    writer.write(said.encode() + b"\n")
    writer.close()


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def tell(costs: Sequence[float], memory: Sequence[float]) -> None:
    """Print milliseconds a turn and megabytes, each measured over parts of a run."""
    print(f"processor time a turn: median {median(costs):.3f} ms, most {max(costs):.3f} ms of a part")
    tenth = max(1, len(memory) // 10)
    print("memory, MB:", ", ".join(f"{one:.0f}" for one in memory[tenth - 1 :: tenth]))


def slope(memory: Sequence[float], episodes: int) -> tuple[float, float]:
    """(bytes an episode, standard error) by which memory grows over the last four fifths of equal parts of a run."""
    later = np.array(memory[len(memory) // 5 :]) * 1e6
    at = np.arange(len(later)) * episodes
    (found, _), covariance = np.polyfit(at, later, 1, cov=True)
    return float(found), float(np.sqrt(covariance[0, 0]))


def engine_folder(builder: PolicyBuilder, folder: Path) -> Path:
    """A folder with the tokenizer and the configuration of the model, as engines' clients read them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(builder.cfg.to_dict()))
    builder.tokenizer.save(folder)
    return folder


def late_engine(folder: Path, reply_ids: list[int], seconds: float) -> AsyncEngine:
    """The client of such an engine in a process of its own. `folder`: with the tokenizer and config.json of a model."""
    script = json.dumps({"reply_ids": reply_ids, "seconds": seconds})
    config = EngineConfig(watchdog_timeout=60.0).model_dump()
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "lora_norm_eps": None, "tokenizer": None}
    link: Any = ProcessLink(Start(path=script, config=config, builder="tests.support.late_core:build", **fields))
    return AsyncEngine(JoinedLLM(link, folder, generation_config="auto", seed=0, table=()))


async def num_answers(engines: Engines) -> int:
    return sum(one["answers"] for one in await engines.stats())


async def conduct(recipe: RLRecipe, out: Path, steps: int, agents: str) -> tuple[list[float], list[float]]:
    """Milliseconds of processor time a turn of each step, and megabytes after it. `agents`: where they listen, if
    episodes are theirs."""
    builder = PolicyBuilder(recipe, out)
    folder = engine_folder(builder, out / "engine")
    reply = builder.tokenizer.encode("<think>so</think>3<|user|>" if agents else "3<|user|>")
    engines = Engines(lambda _: late_engine(folder, reply, SECONDS), ENGINES)
    engines.start()
    rollouts = AsyncRollouts(recipe, builder.tasks, 0, ServiceSettings(recipe, recipe.folder))
    opened = gateway(builder.template, builder.tokenizer, environment={}) if agents else nullcontext()
    workers, costs, memory = EnvironmentWorkers([one.name for one in recipe.environment], num_workers=1), [], []
    try:
        async with workers:
            policy = Policy(engines, recipe.rollouts)
            with opened as server, settled():
                if server is not None:
                    assert recipe.agent is not None
                    harness = AskingHarness(policy, workers, builder.chat, server, recipe.agent)
                    harness.path = agents
                else:
                    harness = Harness(policy, workers, builder.chat)
                rollouts.play_with(harness)
                before, turns = time.process_time(), 0
                for step in range(steps):
                    for rollout in (one for group in await rollouts.batch(step) for one in group.rollouts):
                        assert not agents or (rollout.num_turns, rollout.metrics["forks"]) == (TURNS, 0), rollout
                    spent, done = time.process_time(), await num_answers(engines)
                    costs.append(1e3 * (spent - before) / max(1, done - turns))
                    memory.append(resident_mb())
                    before, turns = spent, done
                    rollouts.figures()  # as a run asks for, and forgets what they are of
                    rollouts.pushed(step + 1)
                await rollouts.cancel()
        busy = sorted(one["answers"] for one in await engines.stats())
    finally:
        await engines.close()
    print(
        f"answers of {ENGINES} engines: {busy[0]} to {busy[-1]}, "
        f"busiest {busy[-1] * ENGINES / sum(busy):.2f} of the mean"
    )
    return costs, memory


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=20_480)
    parser.add_argument("--gateway", action="store_true", help="episodes are agents that ask the gateway")
    args = parser.parse_args()
    logging.getLogger("glm5.serve").setLevel(logging.WARNING)
    with TemporaryDirectory() as folder:
        settings = (
            *('algorithm.name="dis"', "asynchronous.max_staleness=1000", f"rollouts.concurrency={CONCURRENT}"),
            *(f"rollouts.groups={CONCURRENT // GROUP // 4}", f"rollouts.group_size={GROUP}"),
            *("environment.0.tasks=1000", *(['environment.0.name="sort"', 'agent.command=["none"]'] * args.gateway)),
        )
        recipe = small_recipe(Path(folder), *settings)
        steps, path = args.episodes * 4 // CONCURRENT, f"{folder}/agents" if args.gateway else ""
        agents = get_context("spawn").Process(target=run_agents, args=(path,))
        if path:
            agents.start()
            while agents.is_alive() and not Path(path).exists():
                time.sleep(0.05)
        began = time.monotonic()
        try:
            costs, memory = asyncio.run(conduct(recipe, Path(folder) / "run", steps, path))
        finally:
            if path:
                agents.terminate()
    print(f"{args.episodes} episodes, {CONCURRENT} at a time, in {time.monotonic() - began:.0f} s")
    tell(costs, memory)
    found, error = slope(memory, CONCURRENT // 4)
    print(f"memory grows by {found:.0f} bytes an episode (standard error {error:.0f}; a leak: {LEAST_LEAK} or more)")


if __name__ == "__main__":
    main()
