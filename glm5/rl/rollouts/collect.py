"""All groups of a step, played at the same time: the engine batches whatever is under way."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glm5.common.errors import EngineDead, TrainingError
from glm5.rl.environments.protocol import EpisodeFailed, Task
from glm5.rl.rollout import Group, Rollout
from glm5.rl.rollouts.harness import Harness
from glm5.rl.rollouts.program import ProgramHarness
from glm5.rl.segments import seed_of

ATTEMPTS = 3  # at a task: a worker that dies takes the requests of others with it


AnyHarness = Harness | ProgramHarness


@dataclass(frozen=True)
class Draw:
    """A group to play: its number in the run, and its task by environment, seed and level."""

    number: int
    environment: str
    seed: int
    level: int


async def collect(
    harness: AnyHarness,
    draws: Sequence[Draw],
    group_size: int,
    *,
    run_seed: int,
    concurrency: int | None = None,
    on_group: Callable[[Group], None] = lambda _: None,
) -> list[Group]:
    """The groups of `draws`, in their order; in self-play one for each seat. `concurrency`: the most rollouts at a
    time; without it, those are asked for first whose environment takes its time, which it does while others are
    sampled. `on_group` is called as each ends. Raises groups of EngineDead or TrainingError."""
    at_once = asyncio.Semaphore(max(1, concurrency // group_size) if concurrency is not None else 10**9)

    async def one(draw: Draw) -> list[Group]:
        async with at_once:
            groups = await play_group(harness, draw, group_size, run_seed)
        for group in groups:
            on_group(group)
        return groups

    async with asyncio.TaskGroup() as running:
        order = range(len(draws)) if concurrency is not None else _slow_first(harness, draws)
        tasks = {place: running.create_task(one(draws[place])) for place in order}
    return [group for place in range(len(draws)) for group in tasks[place].result()]


def _slow_first(harness: AnyHarness, draws: Sequence[Draw]) -> list[int]:
    quick = [harness.workers.is_quick(draw.environment, draw.level) for draw in draws]
    return sorted(range(len(draws)), key=quick.__getitem__)


def cause_of(error: Exception) -> Exception:
    """The end of the engine in a group of errors, or else the first of them."""
    if not isinstance(error, ExceptionGroup):
        return error
    found = error.subgroup(EngineDead) or error
    return cause_of(found.exceptions[0])


async def play_group(
    harness: AnyHarness,
    draw: Draw,
    group_size: int,
    run_seed: int,
    on_episode: Callable[[int], None] = lambda _: None,
    late: asyncio.Event | None = None,
) -> list[Group]:
    """The group of a draw; in self-play one for each seat. `on_episode` is called with the number of each episode as it
    ends. Once `late` is set, those that have not ended fail as stale. Raises EngineDead or TrainingError, alone or in
    groups."""
    task = await _task(harness, draw)
    episodes = await harness.play(task, seed_of(run_seed, draw.number), group_size, on_episode, late)
    seats = max(len(episode) for episode in episodes)
    groups = [
        Group(draw.number, task, [episode[seat] for episode in episodes if seat < len(episode)])
        for seat in range(seats)
    ]
    if seats == 1 and len(groups[0].rollouts) > 1:
        await _score_together(harness, groups[0])
    if harness.reward is not None:
        for group in groups:
            await harness.reward(group, draw.environment)
    return groups


async def _task(harness: AnyHarness, draw: Draw) -> Task:
    reason: EpisodeFailed | None = None
    for _ in range(ATTEMPTS):
        try:
            return await harness.workers.task(draw.environment, draw.seed, draw.level)
        except EpisodeFailed as failure:
            reason = failure
    raise TrainingError(f"environment {draw.environment}: no task of seed {draw.seed}, level {draw.level}: {reason}")


async def _score_together(harness: AnyHarness, group: Group) -> None:
    """Rewards that depend on all rollouts of a group, where the environment gives such."""
    valid: Sequence[Rollout] = [rollout for rollout in group.rollouts if rollout.is_valid]
    before = [rollout.reward for rollout in valid]
    try:
        after = await harness.workers.score_group(group.task, before)
    except EpisodeFailed as failure:
        for rollout in valid:
            rollout.failure, rollout.failure_reason = failure.kind, failure.reason[:500]
        return
    for rollout, old, new in zip(valid, before, after, strict=True):
        if new != old:
            rollout.rewards["group"] = new - old
