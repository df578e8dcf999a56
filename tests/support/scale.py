"""What a thousand rollouts at once cost the process that conducts them: `python -m tests.support.scale`.

Dispatcher, sink, harness, the routing of 16 engines and the environment's worker are the real ones; the engines are
scripted: each answers with a legal guess after `SECONDS`. Processor time a turn is that of this process; memory is what
it has at the end of each tenth of the episodes.
"""

import argparse
import asyncio
import resource
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from glm5.config.rl import RLRecipe
from glm5.engine.frontend.outputs import Delta
from glm5.rl.build import PolicyBuilder
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.orchestrator.rollouts import AsyncRollouts
from glm5.rl.rollouts.engines import Engines
from glm5.rl.rollouts.harness import Harness
from glm5.rl.rollouts.policy import Policy
from glm5.rl.services import ServiceSettings
from tests.support.rl_recipe import small_recipe

SECONDS = 0.5
CONCURRENT, GROUP, ENGINES = 1024, 16, 16


class ScriptedEngine:
    """Answers any prompt with one reply."""

    stopped_because, is_ready, info = None, True, SimpleNamespace(vocab_size=1 << 20)

    def __init__(self, reply_ids: Sequence[int]) -> None:
        self.reply_ids, self.num_turns = tuple(reply_ids), 0

    def start(self) -> None: ...

    def close(self) -> None: ...

    async def stats(self) -> dict[str, Any]:
        return {"last_push": {"seconds": 0.0}, "pages": {"in_use": 7, "all": 10}}

    async def update_weights(self, *_: object, **__: object) -> None: ...

    def generate(self, prompt_ids: Sequence[int], params: Any, **_: object) -> "_Answers":
        del prompt_ids
        return _Answers(self, params.n)


class _Answers:
    def __init__(self, engine: ScriptedEngine, count: int) -> None:
        self.engine, self.count = engine, count

    async def __aenter__(self) -> AsyncIterator[Any]:
        return self.deltas()

    async def __aexit__(self, *_: object) -> None: ...

    async def deltas(self) -> AsyncIterator[Any]:
        await asyncio.sleep(SECONDS)
        ids = self.engine.reply_ids
        self.engine.num_turns += self.count
        for index in range(self.count):
            yield Delta(ids, (), "stop", index=index, tempered_logprobs=(-1.0,) * len(ids))


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def tell(costs: Sequence[float], memory: Sequence[float]) -> None:
    """Print milliseconds a turn and megabytes, each measured over parts of a run."""
    print(f"processor time a turn: median {median(costs):.3f} ms, most {max(costs):.3f} ms of a part")
    tenth = max(1, len(memory) // 10)
    print("memory, MB:", ", ".join(f"{one:.0f}" for one in memory[tenth - 1 :: tenth]))


async def conduct(recipe: RLRecipe, out: Path, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of processor time a turn of each step, and megabytes after it."""
    builder = PolicyBuilder(recipe, out)
    reply = builder.tokenizer.encode("3<|user|>")
    made = [ScriptedEngine(reply) for _ in range(ENGINES)]
    engines = Engines(lambda number: made[number], ENGINES)  # pyright: ignore[reportArgumentType]
    engines.start()
    rollouts = AsyncRollouts(recipe, builder.tasks, 0, ServiceSettings(recipe, recipe.folder))
    costs, memory = [], []
    async with EnvironmentWorkers([one.name for one in recipe.environment], num_workers=1) as workers:
        rollouts.play_with(Harness(Policy(engines, recipe.rollouts), workers, builder.chat))
        before, turns = time.process_time(), 0
        for step in range(steps):
            await rollouts.batch(step)
            spent, done = time.process_time(), sum(engine.num_turns for engine in made)
            costs.append(1e3 * (spent - before) / max(1, done - turns))
            memory.append(resident_mb())
            before, turns = spent, done
            rollouts.pushed(step + 1)
        await rollouts.cancel()
    busy = sorted(engine.num_turns for engine in made)
    print(
        f"turns of {ENGINES} engines: {busy[0]} to {busy[-1]}, busiest {busy[-1] * ENGINES / sum(busy):.2f} of the mean"
    )
    return costs, memory


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=20_480)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        settings = (
            *('algorithm.name="dis"', "asynchronous.max_staleness=1000", f"rollouts.concurrency={CONCURRENT}"),
            *(
                f"rollouts.groups={CONCURRENT // GROUP // 4}",
                f"rollouts.group_size={GROUP}",
                "environment.0.tasks=1000",
            ),
        )
        recipe = small_recipe(Path(folder), *settings)
        steps = args.episodes * 4 // CONCURRENT
        began = time.monotonic()
        costs, memory = asyncio.run(conduct(recipe, Path(folder) / "run", steps))
    took = time.monotonic() - began
    print(f"{args.episodes} episodes, {CONCURRENT} at a time, in {took:.0f} s")
    tell(costs, memory)


if __name__ == "__main__":
    main()
