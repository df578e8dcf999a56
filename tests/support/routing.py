"""What routing costs: agents whose prompts grow, on several engines, by the ring, at random, and on one engine with all
the cache. `python -m tests.support.routing` prints a table.

Each agent asks for a reply, hears the tools' results, and asks again with all that was before; weights are pushed after
every second round. Hits: prompt tokens that the engines found computed, of those that one engine finds.
"""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from glm5.config.rl import Rollouts
from glm5.engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.rl.rollouts.engines import Engines
from glm5.rl.rollouts.policy import Policy
from tests.support.models import random_model

ROUNDS, RESULT, PUSH_EVERY = 8, 96, 4
PAGES = 1280
"""Of all engines together: a quarter more than all conversations need at the end."""

Key = Callable[[int, int], int]


def by_group(agent: int, _: int) -> int:
    return agent


def at_random(agent: int, turn: int) -> int:
    return agent * 1000 + turn


async def play(engines: Engines, weights, num_agents: int, key: Key, on_round: Callable[[int], None]) -> dict:
    """Hits, prompt tokens and the number of replies of each engine."""
    cfg = Rollouts(groups=num_agents, group_size=1, max_tokens=16, max_model_len=1024)
    policy, random = Policy(engines, cfg), Random(0)
    prompts = [[random.randrange(1, 200) for _ in range(RESULT)] for _ in range(num_agents)]
    busy = dict[int, int]()
    all_engines = dict(enumerate(engines.alive))

    async def one(agent: int, turn: int) -> None:
        placed = key(agent, turn)
        number = next((i for i, engine in all_engines.items() if engine is engines.of(placed)), -1)
        busy[number] = busy.get(number, 0) + 1
        reply = await policy.reply(prompts[agent], agent * 100 + turn, placed)
        prompts[agent] += [*reply.token_ids, *(random.randrange(1, 200) for _ in range(RESULT))]
        if key is at_random:
            engines._ring.release(placed)

    for turn in range(ROUNDS):
        await asyncio.gather(*(one(agent, turn) for agent in range(num_agents)))
        on_round(turn)
        if turn % PUSH_EVERY == PUSH_EVERY - 1:
            await engines.update_weights(weights, policy="recompute", version=turn // PUSH_EVERY + 1)
    stats = [(await engine.stats())["prefix_cache"] for engine in engines.alive]
    return {
        "hits": sum(sum(one["hit_tokens"].values()) for one in stats),
        "asked": sum(one["query_tokens"] for one in stats),
        "busy": sorted(busy.values()),
    }


def measure(count: int, num_agents: int, key: Key, on_round: Callable[[int], None] = lambda _: None) -> dict:
    options = {"max_model_len": 1024, "deterministic": True, "num_threads": 1, "max_num_seqs": num_agents}
    pages = PAGES // count

    def make(_: int) -> AsyncEngine:
        return AsyncEngine(LLM(random_model(0), num_gpu_blocks_override=pages, max_num_batched_tokens=2048, **options))

    async def whole() -> dict:
        engines = Engines(make, count)
        engines.start()
        try:
            return await play(engines, random_model(0).state_dict(), num_agents, key, on_round)
        finally:
            await engines.close()

    return asyncio.run(whole())


def rows(num_agents: int = 64) -> Sequence[tuple[str, dict]]:
    found = [("one engine", measure(1, num_agents, by_group))]
    found.append(("four, by the ring", measure(4, num_agents, by_group)))
    found.append(("four, at random", measure(4, num_agents, at_random)))
    return found


def main() -> None:
    found = rows()
    whole = found[0][1]["hits"]
    print("| routing | prompt tokens found computed | of one engine's | busiest, of the mean |\n|---|---|---|---|")
    for name, one in found:
        busiest = max(one["busy"]) / (sum(one["busy"]) / len(one["busy"]))
        print(f"| {name} | {one['hits']} of {one['asked']} | {one['hits'] / whole:.3f} | {busiest:.2f} |")


if __name__ == "__main__":
    main()
