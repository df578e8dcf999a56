"""What a reply costs the processes around the model: `python -m tests.support.reply_cost OUT [--steps 6]`.

The rollouts of `recipes/rl-domains.toml` (5,376 replies a step) with the real harness, workers, client and engine core.
In the place of the model a table says the solutions of the tasks, with a wrong token in some, as fast as it is asked.
Prints microseconds of processor time a reply, of the process that conducts them and of the engine's.
"""

import argparse
import asyncio
import json
import pickle
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from glm5.common.garbage import settled
from glm5.config.engine import EngineConfig
from glm5.config.rl import RLRecipe, read_rl_recipe
from glm5.engine import AsyncEngine
from glm5.engine.core.engine_core import EngineCore
from glm5.engine.joined import JoinedLLM
from glm5.engine.runner.result import StepResult
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.plan import StepPlan
from glm5.engine.transport.link import ProcessLink
from glm5.engine.transport.wire import EngineInfo, Start, TokenLogprobs
from glm5.rl.build import PolicyBuilder, num_rollouts
from glm5.rl.environments.play import play_solution
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.rollout import Group
from glm5.rl.rollouts.collect import collect
from glm5.rl.rollouts.engines import Engines
from glm5.rl.rollouts.harness import Harness
from glm5.rl.rollouts.policy import Policy
from glm5.rl.rollouts.refill import refilled
from glm5.rl.tasks import TaskSource
from tests.support.fake_runner import FakeWeights, Launched
from tests.support.scale import engine_folder

GROUPS, GROUP = 336, 16
WEIGHTS = (6.4, 0.8, 0.6, 0.6)
WRONG = 15  # of 100 replies
PAGES = 1 << 15
WARM = 2  # steps that are not counted


class Speaker:
    """A runner that says `replies`, by prompt, and `end` where there is none."""

    def __init__(self, replies: Mapping[tuple[int, ...], list[int]], end: int) -> None:
        self._replies, self._end, self._saying = replies, end, dict[int, Iterator[int]]()

    def weights_changed(self) -> None: ...
    def set_bitmasks(self, *_: Any) -> None: ...
    def restore_memory(self) -> None: ...
    def release_memory(self) -> int:
        return 0

    def launch(self, plan: StepPlan, specs: Mapping[int, Any]) -> Launched:
        for one in plan.entered:
            said, seed = list(self._replies.get(tuple(one.token_ids), ())), specs[one.seq_id].seed
            if seed % 100 < WRONG and len(said) > 1:
                said[seed // 100 % (len(said) - 1)] = said[0]
            self._saying[one.seq_id] = iter(said)
        result = StepResult()
        for item in plan.items:
            if item.samples:
                token = next(self._saying[item.seq_id], self._end)
                result.tokens[item.seq_id] = [token]
                result.logprobs[item.seq_id] = [TokenLogprobs(token, -0.125, -0.0625, 1)]
        return Launched(result)


class TimedCore(EngineCore):
    def stats(self) -> dict[str, Any]:
        return super().stats() | {"processor_s": time.process_time()}


def build(start: Start, on_progress: Any) -> EngineCore:
    """For the engine's process."""
    on_progress("loading", 1.0)
    table, end, vocab, at_once = pickle.loads(Path(start.path).read_bytes())
    sizes = (64, PAGES, at_once, max(at_once, 2048), 512)
    info = EngineInfo(*sizes, 0, vocab, max_logprobs=20, routed_experts=False, table=[])
    runner: Any = Speaker(table, end)
    return TimedCore(runner, SchedulerConfig(*sizes), info, weights=FakeWeights(), cache=runner)


def solutions(builder: PolicyBuilder, draws: set[tuple[str, int, int]]) -> dict[tuple[int, ...], list[int]]:
    """The reply to each prompt of these tasks."""
    found = dict[tuple[int, ...], list[int]]()
    for name, seed, level in draws:
        environment = builder.environments[name]
        task = environment.task(seed, level)
        for messages in play_solution(environment, task):
            ids, marks = builder.chat.conversation(messages, task.tools)
            edges = [0, *(at for at in range(1, len(ids)) if marks[at] != marks[at - 1]), len(ids)]
            found |= {tuple(ids[:a]): ids[a:b] for a, b in pairwise(edges) if marks[a]}
    return found


def engine(builder: PolicyBuilder, folder: Path, table: Path) -> AsyncEngine:
    config = EngineConfig(watchdog_timeout=600.0).model_dump()
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "lora_norm_eps": None, "tokenizer": None}
    link: Any = ProcessLink(Start(path=str(table), config=config, builder="tests.support.reply_cost:build", **fields))
    return AsyncEngine(JoinedLLM(link, folder, generation_config="auto", seed=0, table=()))


async def conduct(recipe: RLRecipe, out: Path, steps: int, workers: int) -> list[tuple[float, float]]:
    """Microseconds a reply of each step: here, and in the engine's process."""
    builder = PolicyBuilder(recipe, out)
    drawn = {(one.environment, one.seed, one.level) for step in range(steps) for one in builder.tasks.draws(step)}
    table, end, costs = out / "table.pickle", builder.chat.said("")[-1], list[tuple[float, float]]()
    table.write_bytes(pickle.dumps((solutions(builder, drawn), end, builder.cfg.vocab_size, num_rollouts(recipe))))
    folder = engine_folder(builder, out / "engine")
    engines, tasks = Engines(lambda _: engine(builder, folder, table)), TaskSource(recipe, builder.environments)
    engines.start()
    names, sandbox = [one.name for one in recipe.environment], builder.sandbox(unsafe_local=True)
    try:
        async with EnvironmentWorkers(names, num_workers=workers, sandbox=sandbox) as running:
            harness = Harness(Policy(engines, recipe.rollouts), running, builder.chat)

            async def play(draws: Any) -> list[Group]:
                return await collect(harness, draws, GROUP, run_seed=recipe.seed)

            with settled():
                for step in range(steps):
                    costs.append(await cost(engines, lambda step=step: refilled(play, tasks, step)))
    finally:
        await engines.close()
    return costs


async def cost(engines: Engines, roll: Any) -> tuple[float, float]:
    ((before,), began) = await engines.stats(), time.process_time()
    groups = await roll()
    here, (after,) = time.process_time() - began, await engines.stats()
    count = sum(len(group.rollouts) for group in groups)
    found = here / count * 1e6, (after["processor_s"] - before["processor_s"]) / count * 1e6
    print(json.dumps({"replies": count, "conducting_us": round(found[0]), "engine_us": round(found[1])}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    weights = [f"environment.{number}.weight={weight}" for number, weight in enumerate(WEIGHTS)]
    tasks = [f"environment.{number}.tasks=256" for number in range(len(WEIGHTS))]
    sizes = [f"out={args.out}", "device=cpu", f"rollouts.groups={GROUPS}", f"rollouts.group_size={GROUP}"]
    recipe = read_rl_recipe(Path("recipes/rl-domains-start.toml"), (*sizes, *weights, *tasks))
    args.out.mkdir(parents=True)
    costs = asyncio.run(conduct(recipe, args.out, args.steps, args.workers))[WARM:]
    print("medians: conducting {:.0f} us, engine {:.0f} us".format(*map(median, zip(*costs, strict=True))))


if __name__ == "__main__":
    main()
