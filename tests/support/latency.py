"""Time to a reward where environments answer late: rollouts that go on while the trainer learns, beside taking turns.

    python -m tests.support.latency OUT --way asynchronous --seed 0 --set steps=60
    python -m tests.support.latency --table OUT/turns-0 OUT/asynchronous-0 ...
    python -m tests.support.latency --record FILE            a trace of terminal tasks, for --trace

Each answer of the environment comes after a log-normal time (median 1 s, sigma 1.2), or one of a recorded trace.
Oversubscribed turns start half as many groups again, as soon as others have ended, and take those that end first.
"""

import argparse
import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean, mean, median, stdev

from glm5.common.atomic import atomic_write
from glm5.config.rl import read_rl_recipe
from glm5.rl import loop
from glm5.rl.environments.protocol import Reply, Turn
from glm5.rl.environments.table import make
from glm5.rl.environments.workers import EnvironmentWorkers, RemoteEpisode
from glm5.rl.rollout import Group
from glm5.rl.rollouts.collect import Draw, play_group
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.watch import read_lines

MEDIAN_S, SIGMA, LONGEST_S = 1.0, 1.2, 60.0
WAYS = {
    "turns": ("algorithm.name=dis",),
    "oversubscribed": ("algorithm.name=dis",),
    "overlap": ("asynchronous.max_staleness=1", "algorithm.name=dis"),
    "asynchronous": ("asynchronous.max_staleness=4", "algorithm.name=dis"),
}
OVERSUBSCRIBED = 1.5
TERMINAL, RECORDED = "terminal", 300
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # 95 %, by the number of pairs


class Latency:
    """Times of a trace, in a random order, or log-normal ones; scaled by `scale`."""

    def __init__(self, seed: int, scale: float, trace: Path | None = None) -> None:
        self.random, self.scale = Random(seed), scale
        self.trace = [] if trace is None else json.loads(trace.read_text())["seconds"]

    def next(self) -> float:
        own = self.random.choice(self.trace) if self.trace else MEDIAN_S * math.exp(SIGMA * self.random.gauss(0, 1))
        return self.scale * min(LONGEST_S, own)


def slow(latency: Latency) -> None:
    """From now on environments answer late."""
    step = RemoteEpisode.step

    async def late(self: RemoteEpisode, reply: Reply) -> Turn:
        turn = await step(self, reply)
        await asyncio.sleep(latency.next())
        return turn

    RemoteEpisode.step = late  # pyright: ignore[reportAttributeAccessIssue]


async def record(file: Path) -> None:
    """Seconds of each answer of terminal tasks to their oracle's replies, graded at the end."""
    environment, seconds = make(TERMINAL), list[float]()
    async with EnvironmentWorkers([TERMINAL], num_workers=1, sandbox=choose_backend()) as workers:
        for seed in range(RECORDED):
            episode = await workers.reset(task := await workers.task(TERMINAL, seed, seed % environment.levels))
            for reply in environment.oracle(task):
                began = time.monotonic()
                await episode.step(reply)
                seconds.append(round(time.monotonic() - began, 5))
            await episode.close()
    with atomic_write(file) as handle:
        handle.write(json.dumps({"environment": TERMINAL, "tasks": RECORDED, "seconds": seconds}) + "\n")
    print(f"{len(seconds)} answers, median {median(seconds):.4f} s, largest {max(seconds):.4f} s")


def oversubscribe() -> None:
    """From now on runs that take turns play more groups than a step needs."""

    async def play(self: loop.Run, draws: Sequence[Draw]) -> list[Group]:
        cfg = self.recipe.rollouts
        some = math.ceil(len(draws) * OVERSUBSCRIBED)
        more = [replace(one, number=one.number + 10**6, seed=one.seed + 10**6) for one in draws][: some - len(draws)]
        at_once = asyncio.Semaphore((cfg.concurrency or cfg.groups * cfg.group_size) // cfg.group_size)

        async def one(draw: Draw) -> list[Group]:
            async with at_once:
                return await play_group(self.harness, draw, cfg.group_size, self.recipe.seed)

        playing = [asyncio.create_task(one(draw)) for draw in (*draws, *more)]
        ended = [await one for one, _ in zip(asyncio.as_completed(playing), draws, strict=False)]
        for task in playing:
            task.cancel()
        for task in playing:
            with suppress(asyncio.CancelledError):
                await task
        return sorted((group for groups in ended for group in groups), key=lambda group: group.number)

    loop.Run._play = play  # pyright: ignore[reportAttributeAccessIssue]


def steps_of(out: Path) -> list[dict[str, float]]:
    return [one for one in read_lines(out / "metrics.jsonl") if "time/step" in one]


def seconds_to(out: Path, goal: float) -> float:
    """Until the mean reward of five steps is `goal`; infinity if it never is."""
    lines, seconds = steps_of(out), 0.0
    for number, line in enumerate(lines):
        seconds += line["time/step"]
        if mean(one["reward/mean"] for one in lines[max(0, number - 4) : number + 1]) >= goal and number >= 4:
            return seconds
    return math.inf


def bound(lines: Sequence[dict[str, float]], rollouts: int, concurrency: int) -> float:
    """Seconds of a step that no order of the work can go below: the most of the trainer's busy time, the engine's, and
    that of `concurrency` episodes at a time, which wait for their environments."""
    busy = fmean(one["time/train"] + one["time/push"] + one["time/record"] for one in lines)
    engine = fmean((1 - one["wait/engines"]) * one["time/step"] for one in lines)
    waits = [one["episode/environment_s"] for one in lines if "episode/environment_s" in one]
    return max(busy, engine, fmean(waits) * rollouts / concurrency)


def table(outs: Sequence[Path]) -> None:
    """Runs in folders WAY-SEED: seconds to 95 % of what taking turns ends at, and ratios of pairs."""
    runs: dict[str, dict[str, Path]] = defaultdict(dict)
    for out in outs:
        way, _, seed = out.name.rpartition("-")
        runs[way][seed] = out
    final = mean(mean(one["reward/mean"] for one in steps_of(out)[-5:]) for out in runs["turns"].values())
    goal = 0.95 * final
    print(f"taking turns ends at {final:.3f}; seconds to {goal:.3f}:")
    found = {way: {seed: seconds_to(out, goal) for seed, out in by_seed.items()} for way, by_seed in runs.items()}
    for way, by_seed in runs.items():
        lines = [line for out in by_seed.values() for line in steps_of(out)[10:]]
        step = fmean(one["time/step"] for one in lines)
        recipe = json.loads((next(iter(by_seed.values())) / "recipe.json").read_text())["rollouts"]
        size = recipe["groups"] * recipe["group_size"]
        at_least = bound(lines, size, recipe["concurrency"] or size)
        last = mean(mean(one["reward/mean"] for one in steps_of(out)[-5:]) for out in by_seed.values())
        print(
            f"| {way} | {' | '.join(f'{one:.0f}' for one in found[way].values())} | {step:.2f} s a step, at least "
            f"{at_least:.2f} s by busy times ({100 * at_least / step:.0f} %) | reward at the end {last:.3f} |"
        )
    for way in runs.keys() - {"asynchronous"}:
        seeds = sorted(found[way].keys() & found["asynchronous"].keys())
        logs = [math.log(found[way][seed] / found["asynchronous"][seed]) for seed in seeds]
        half = STUDENT.get(len(logs), 1.96) * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
        middle = mean(logs)
        print(
            f"asynchronous to {way}: {math.exp(middle):.2f} times as soon (95 % {math.exp(middle - half):.2f} to "
            f"{math.exp(middle + half):.2f}, {len(logs)} pairs)"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--recipe", default="recipes/rl-sort.toml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=list(WAYS), default="asynchronous")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--set", nargs="*", default=[])
    args = parser.parse_args()
    if args.table:
        table(args.out)
        return
    if args.record:
        asyncio.run(record(args.out[0]))
        return
    slow(Latency(args.seed, args.scale, args.trace))
    if args.way == "oversubscribed":
        oversubscribe()
    (out,) = args.out
    settings = (f"out={out}", f"seed={args.seed}", "records.every=0", *WAYS[args.way], *args.set)
    loop.run(read_rl_recipe(args.recipe, settings), restart=True)
    seconds = 0.0
    for number, line in enumerate(lines := steps_of(out)):
        seconds += line["time/step"]
        if (number + 1) % 10 == 0:
            reward = mean(one["reward/mean"] for one in lines[max(0, number - 4) : number + 1])
            print(f"{args.way}, seed {args.seed}: step {number + 1}, {seconds:.1f} s, reward {reward:.3f}")


if __name__ == "__main__":
    main()
