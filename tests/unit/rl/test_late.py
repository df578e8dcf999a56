"""Episodes that a group does not wait for: they fail as stale, and what they held is given back."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from glm5.common.errors import EngineDead
from glm5.config.rl import AgentSection
from glm5.rl.environments.protocol import EpisodeFailed, Reply, Task, Turn
from glm5.rl.rollouts.harness import Harness, unless_late
from glm5.rl.rollouts.policy import Sampled
from glm5.rl.rollouts.program import ProgramHarness
from glm5.rl.segments import SegmentTree

TASK = Task("named", 0, 0, (), {})
HANGS = 2  # number of the episode that has no end


class HangingEpisode:
    def __init__(self, number: int) -> None:
        self.messages = ({"role": "user", "content": f"{number}"},)
        self.hangs, self.is_closed = number == HANGS, False

    async def step(self, reply: Reply) -> Turn:
        if self.hangs:
            await asyncio.Event().wait()
        return Turn(is_done=True, rewards={"all": 1.0})

    async def close(self) -> None:
        self.is_closed = True


class Workers:
    async def reset_all(self, task: Task, count: int) -> list[HangingEpisode]:
        self.episodes = [HangingEpisode(number) for number in range(count)]
        return self.episodes


async def reply(*_):
    return Sampled([5], logprobs=[-1.0], versions=[3], is_truncated=False)


class Held:
    def __enter__(self): ...
    def __exit__(self, *_): ...


ENGINES = SimpleNamespace(held=lambda *_: Held(), of=lambda _: SimpleNamespace(is_ready=True))
CFG = SimpleNamespace(guard=None, context=None, system="", max_tokens=4)
POLICY = SimpleNamespace(cfg=CFG, engines=ENGINES, room=lambda _: 4, reply=reply, sampling={}, keeps_pages=False)
CHAT = SimpleNamespace(
    start=lambda messages, tools: [1, 2],
    prompt=lambda messages, tools: [1, 2],
    reply=lambda ids, tools, is_truncated, num_calls: Reply("done"),
    enable_thinking=False,
)


def played(make, *, ends: int):
    """Four episodes, of which one hangs, and which are not waited for once `ends` have ended."""

    async def run():
        workers, late, ended = Workers(), asyncio.Event(), list[int]()

        def on_episode(number: int) -> None:
            ended.append(number)
            if len(ended) == ends:
                late.set()

        rollouts = await make(workers).play(TASK, 7, 4, on_episode, late)
        return [one for (one,) in rollouts], ended, workers.episodes

    return asyncio.run(run())


def test_a_group_ends_without_those_that_are_late(monkeypatch):
    monkeypatch.setattr("glm5.rl.rollouts.harness.Conversation", Silent)
    rollouts, ended, episodes = played(lambda workers: Harness(POLICY, workers, CHAT), ends=3)  # pyright: ignore[reportArgumentType]
    assert [one.failure for one in rollouts] == [None, None, "stale", None]
    assert [one.reward for one in rollouts] == [1, 1, 0, 1]
    assert ended == [0, 1, 3, HANGS]
    assert all(one.is_closed for one in episodes)


class Silent:
    def __init__(self, rollout, *_) -> None:
        self.rollout, self.token_ids, self.needs_summary, self.num_calls = rollout, [1], False, 0

    def hear(self, messages, prompt) -> None: ...
    def add(self, sampled) -> None: ...
    def close(self) -> None: ...


def test_a_program_that_is_late_is_killed():
    session = SimpleNamespace(trained=SegmentTree, num_forks=0)
    gateway = SimpleNamespace(key="key", environment={}, begin=lambda *_: "", end=lambda _: session)
    agent = AgentSection(command=(sys.executable, "-c", "print('said')"), timeout_s=600)
    rollouts, ended, _ = played(lambda workers: ProgramHarness(POLICY, workers, CHAT, gateway, agent), ends=3)  # pyright: ignore[reportArgumentType]
    assert [one.failure for one in rollouts] == [None, None, "stale", None]
    assert ended[-1] == HANGS


@pytest.mark.parametrize("is_late", [False, True])
def test_errors_are_not_lost(is_late):
    async def run():
        late = asyncio.Event()

        async def work():
            if not is_late:
                raise EngineDead("it ended")
            late.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise EpisodeFailed("environment", "it could not be closed")

        await unless_late(work(), late)

    with pytest.raises(EpisodeFailed if is_late else EngineDead):
        asyncio.run(run())
