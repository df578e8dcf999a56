"""Episodes in worker processes: the same as in this one, and what is reported when a worker fails."""

import asyncio
from random import Random

import pytest

from glm5.common.errors import ConfigError
from glm5.rl.environments.play import play
from glm5.rl.environments.protocol import EpisodeFailed, Reply, Turn
from glm5.rl.environments.table import make
from glm5.rl.environments.wire import MAX_FRAME
from glm5.rl.environments.workers import EnvironmentWorkers, RemoteEpisode
from glm5.rl.sandbox.choice import choose_backend

HOSTILE = "tests.unit.rl.hostile:Hostile"


async def finish(episode: RemoteEpisode, replies: list[Reply]) -> Turn:
    async with episode:
        for reply in replies:
            turn = await episode.step(reply)
            if turn.is_done:
                return turn
    raise AssertionError("no end")


async def failure_of(episode: RemoteEpisode, said: str) -> EpisodeFailed:
    with pytest.raises(EpisodeFailed) as caught:
        await episode.step(Reply(said))
    return caught.value


def test_episodes_in_workers_are_those_of_this_process():
    random = Random(20261126)
    print("seed 20261126")
    guess = make("guess")
    replies = [[guess.random_reply(guess.task(0, 0), random, "") for _ in range(4)] for _ in range(30)]

    async def run() -> list[Turn]:
        async with EnvironmentWorkers(["guess"], num_workers=2) as workers:
            tasks = [await workers.task("guess", seed, 0) for seed in range(30)]
            assert tasks == [guess.task(seed, 0) for seed in range(30)]
            assert [task.key for task in tasks] == [guess.task(seed, 0).key for seed in range(30)]
            episodes = await asyncio.gather(*map(workers.reset, tasks))
            assert episodes[0].messages == tasks[0].messages
            return await asyncio.gather(*map(finish, episodes, replies))

    for seed, turn in enumerate(asyncio.run(run())):
        said = iter(replies[seed])
        assert turn == play(guess, guess.task(seed, 0), lambda _: next(said)).last  # noqa: B023


def test_what_an_environment_does_wrong_fails_its_episode_alone():
    async def run() -> None:
        async with EnvironmentWorkers([HOSTILE]) as workers:
            task = await workers.task(HOSTILE, 3, 0)
            assert await workers.score_group(task, [1.0, 3.0]) == [0.0, 2.0]
            other, episode = await workers.reset(task), await workers.reset(task)
            bug = await failure_of(episode, "raise")
            assert (bug.kind, bug.reason) == ("environment", "ZeroDivisionError: a bug")
            assert (await failure_of(episode, "sandbox")).kind == "sandbox"
            large = await failure_of(episode, "large")
            assert large.kind == "environment"
            assert str(MAX_FRAME) in large.reason
            assert "hit is nan" in (await failure_of(episode, "nan")).reason
            assert (await failure_of(episode, "x" * MAX_FRAME)).kind == "harness"
            assert (await other.step(Reply("print"))).rewards == {"hit": 0.0}  # an illegal guess

    asyncio.run(run())


def test_a_worker_that_dies_or_hangs_is_replaced():
    async def run() -> None:
        async with EnvironmentWorkers([HOSTILE]) as workers:
            task = await workers.task(HOSTILE, 2, 0)
            for said, reason in (("die", "code 3"), ("hang", "batch took more than 0.5 s")):
                other, episode = await workers.reset(task), await workers.reset(task)
                episode.step_seconds = 0.5 if said == "hang" else episode.step_seconds
                lost = await failure_of(episode, said)
                assert lost.kind == "environment"
                assert reason in lost.reason
                assert reason in (await failure_of(other, "3")).reason
                await episode.close()
                await other.close()
                async with await workers.reset(task) as again:
                    assert (await again.step(Reply("3"))).rewards == {"hit": 1.0}

    asyncio.run(run())


def test_programs_run_in_a_sandbox_of_the_worker():
    try:
        backend = choose_backend()
    except ConfigError as error:
        pytest.skip(str(error))
    code, tools = make("code"), make("tools")
    tasks = [*(code.task(seed, seed) for seed in range(3)), tools.task(0, 2)]
    replies = [list((code if task.environment == "code" else tools).oracle(task)) for task in tasks]
    tasks, replies = [*tasks, tasks[0]], [*replies, [Reply("import os, signal\nos.kill(0, signal.SIGKILL)")]]

    async def run() -> list[Turn]:
        async with EnvironmentWorkers(["code", "tools"], sandbox=backend) as workers:
            return await asyncio.gather(*map(finish, await asyncio.gather(*map(workers.reset, tasks)), replies))

    assert [turn.rewards["right"] for turn in asyncio.run(run())] == [1.0] * 4 + [0.0]


def test_an_environment_that_cannot_be_made_is_named_at_the_start():
    async def run() -> None:
        async with EnvironmentWorkers(["tests.unit.rl.hostile:no_environment"]):
            pass

    with pytest.raises(ConfigError, match="not today"):
        asyncio.run(run())
    for name, told in (("gues", "did you mean guess"), ("no.such:X", "no.such")):
        with pytest.raises(ConfigError, match=told):
            make(name)
