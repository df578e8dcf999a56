"""A harness whose episodes only sleep, for `AsyncRollouts` on a virtual clock (virtual_time.py)."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from glm5.rl.environments.protocol import Task
from glm5.rl.rollout import Rollout
from glm5.rl.rollouts.harness import in_parallel, unless_late
from glm5.rl.segments import Segment


def sleeping_harness(seconds: Callable[[Task], float]) -> Any:
    """Each episode takes `seconds(task)` and has a token of the weights of `version`, an attribute to be set."""

    async def play(task, _seed, count, on_episode, late):
        version = harness.version
        rollouts = [Rollout(task, number, failure="stale") for number in range(count)]

        async def one(rollout):
            rollout.tree.add(Segment([0], is_sampled=True, logprobs=[0.0], versions=[version]))
            await asyncio.sleep(seconds(task))
            rollout.failure = None
            on_episode(rollout.seed)

        await unless_late(in_parallel(map(one, rollouts)), late)
        return [[rollout] for rollout in rollouts]

    async def task_of(name, own, level):
        return Task(name, own, level, (), {})

    async def score_group(_task, rewards):
        return rewards

    async def usage():
        return 0.7

    workers = SimpleNamespace(task=task_of, score_group=score_group)
    policy = SimpleNamespace(engines=SimpleNamespace(usage=usage))
    harness = SimpleNamespace(play=play, workers=workers, policy=policy, version=0, reward=None)
    return harness
