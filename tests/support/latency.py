"""Time to a reward where environments answer late: rollouts that go on while the trainer learns, beside taking turns.

    python -m tests.support.latency OUT --way asynchronous --seed 0 --set steps=60

Each answer of the environment comes after a log-normal time (median 1 s, sigma 1.2).
"""

import argparse
import asyncio
import math
from pathlib import Path
from random import Random
from statistics import mean

from glm5.config.rl import read_rl_recipe
from glm5.rl import loop
from glm5.rl.environments.protocol import Reply, Turn
from glm5.rl.environments.workers import RemoteEpisode
from glm5.rl.watch import read_lines

MEDIAN_S, SIGMA, LONGEST_S = 1.0, 1.2, 60.0
WAYS = {
    "turns": ("algorithm.name=dis",),
    "overlap": ("asynchronous.max_staleness=1", "algorithm.name=dis"),
    "asynchronous": ("asynchronous.max_staleness=4", "algorithm.name=dis"),
}


class Latency:
    """Times of a trace, scaled by `scale`."""

    def __init__(self, seed: int, scale: float) -> None:
        self.random, self.scale = Random(seed), scale

    def next(self) -> float:
        return self.scale * min(LONGEST_S, MEDIAN_S * math.exp(SIGMA * self.random.gauss(0, 1)))


def slow(latency: Latency) -> None:
    """From now on environments answer late."""
    step = RemoteEpisode.step

    async def late(self: RemoteEpisode, reply: Reply) -> Turn:
        turn = await step(self, reply)
        await asyncio.sleep(latency.next())
        return turn

    RemoteEpisode.step = late  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="recipes/rl-guess.toml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=list(WAYS), default="asynchronous")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--set", nargs="*", default=[])
    args = parser.parse_args()
    slow(Latency(args.seed, args.scale))
    settings = (f"out={args.out}", f"seed={args.seed}", "records.every=0", *WAYS[args.way], *args.set)
    loop.run(read_rl_recipe(args.recipe, settings), restart=True)
    lines = [one for one in read_lines(args.out / "metrics.jsonl") if "time/step" in one]
    seconds = 0.0
    for number, line in enumerate(lines):
        seconds += line["time/step"]
        if (number + 1) % 10 == 0:
            reward = mean(one["reward/mean"] for one in lines[max(0, number - 4) : number + 1])
            print(f"{args.way}, seed {args.seed}: step {number + 1}, {seconds:.1f} s, reward {reward:.3f}")


if __name__ == "__main__":
    main()
