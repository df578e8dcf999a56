"""Environments of verifiers: conversations by agent, and workers of another Python. The library itself takes a folder.

GLM5_VERIFIERS names a virtual environment with verifiers 0.4, msgspec and the environment kuhn-poker of its repository.
"""

import asyncio
import os
import sys
from concurrent.futures import Future
from threading import Thread
from types import SimpleNamespace

import pytest

from glm5.common.errors import ConfigError
from glm5.rl.environments.kuhn import DEALS, won_by_first
from glm5.rl.environments.protocol import EpisodeFailed, Reply, Turn
from glm5.rl.environments.table import make
from glm5.rl.environments.verifiers import VerifiersEpisode, _Ask, python_of
from glm5.rl.environments.workers import EnvironmentWorkers


def says(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def trace(agent: str, reward: float = 0.0, *, trainable: bool = True) -> SimpleNamespace:
    rewards = {"payoff": SimpleNamespace(value=reward)}
    own = SimpleNamespace(name=agent, trainable=trainable)
    return SimpleNamespace(id=agent, agent=own, rewards=rewards, metrics={"length": 3, "none": None}, errors=[])


class Script:
    """Plays an episode as verifiers does, by a coroutine that asks in the name of agents."""

    def __init__(self, play) -> None:
        self._play, self.loop = play, asyncio.new_event_loop()
        self.thread = Thread(target=self.loop.run_forever)
        self.thread.start()

    def play(self, episode: VerifiersEpisode, task: object) -> Future:
        async def ask(agent: str, *messages: dict) -> Reply:
            one = _Ask(agent, list(messages), self.loop.create_future())
            episode.asks.put(one)
            return await one.reply

        return asyncio.run_coroutine_threadsafe(self._play(ask), self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def begun():
    scripts = list[Script]()

    def begin(play) -> VerifiersEpisode:
        scripts.append(Script(play))
        return VerifiersEpisode(scripts[-1], None)  # pyright: ignore[reportArgumentType]

    yield begin
    for script in scripts:
        script.close()


def ended(*traces: SimpleNamespace, errors: tuple = ()) -> SimpleNamespace:
    return SimpleNamespace(ok=not errors, errors=list(errors), traces=list(traces))


RULES, FIRST, SECOND = says("system", "rules"), says("user", "one?"), says("user", "two?")


def test_each_agent_has_a_seat_and_only_what_is_new_is_told(begun):
    async def play(ask):
        said = await ask("a", RULES, FIRST)
        other = await ask("b", FIRST)
        assert (said.content, other.content) == (" yes ", "no")
        await ask("a", RULES, FIRST, says("assistant", "yes"), SECOND)  # clients trim
        return ended(trace("a", 2.0), trace("b", -2.0))

    episode = begun(play)
    assert episode.messages == (RULES, FIRST)
    assert episode.step(Reply(" yes ")) == Turn((FIRST,), seat=1)
    assert episode.step(Reply("no")) == Turn((SECOND,), seat=0)
    end = episode.step(Reply("done"))
    assert (end.is_done, end.rewards, end.seat_rewards) == (True, {"payoff": 2.0}, ({"payoff": -2.0},))
    assert end.metrics == {"length": 3.0}


@pytest.mark.parametrize(
    "history",
    [
        [RULES, FIRST, says("assistant", "other words"), SECOND],
        [RULES, FIRST],
        [RULES, says("user", "summary"), SECOND],
        [RULES, FIRST, says("assistant", "yes"), says("assistant", "and more"), SECOND],
    ],
    ids=["edited", "asked again", "compacted", "words in its mouth"],
)
def test_an_edited_history_is_a_conversation_of_its_own(begun, history):
    async def play(ask):
        await ask("a", RULES, FIRST)
        await ask("a", *history)
        await ask("a", *history, says("assistant", "well"), SECOND)
        return ended(trace("a", 1.0))

    episode = begun(play)
    assert episode.step(Reply("yes")) == Turn(tuple(history), seat=1)
    assert episode.step(Reply("well")) == Turn((SECOND,), seat=1)
    end = episode.step(Reply("done"))
    assert (end.rewards, end.seat_rewards) == ({"payoff": 1.0}, ({"payoff": 1.0},))


def failure(kind: str) -> SimpleNamespace:
    return SimpleNamespace(type=kind, message="why")


@pytest.mark.parametrize(
    ("result", "kind", "said"),
    [
        (ended(trace("a"), errors=(failure("SandboxError"),)), "sandbox", "SandboxError: why"),
        (ended(trace("a"), errors=(failure("TaskError"),)), "task", "TaskError: why"),
        (ended(trace("a"), errors=(failure("EnvError"),)), "environment", "EnvError: why"),
        (ended(trace("a", trainable=False)), "environment", "agent a is not trained"),
    ],
)
def test_failures_keep_their_kind(begun, result, kind, said):
    async def play(ask):
        await ask("a", FIRST)
        return result

    with pytest.raises(EpisodeFailed, match=said) as failed:
        begun(play).step(Reply("yes"))
    assert failed.value.kind == kind


def test_an_episode_that_asks_nothing_fails_and_a_closed_one_is_cancelled(begun):
    async def silent(ask):
        return ended(trace("a"))

    with pytest.raises(EpisodeFailed, match="before it asked anything"):
        begun(silent)
    stopped = Future()

    async def waiting(ask):
        try:
            await ask("a", FIRST)
        except asyncio.CancelledError:
            stopped.set_result(True)
            raise

    begun(waiting).close()
    assert stopped.result(timeout=60)


def test_workers_of_two_pythons(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    other = f"verifiers/{tmp_path}/nothing-here"
    assert (python_of(other), python_of("verifiers/x"), python_of("guess")) == (str(python), *[sys.executable] * 2)

    async def run() -> None:
        async with EnvironmentWorkers(["guess", other]) as workers:
            guess = await workers.task("guess", 3, 0)
            assert guess == make("guess").task(3, 0)
            async with await workers.reset(guess) as episode:
                assert (await episode.step(Reply("4"))).is_done
            with pytest.raises(EpisodeFailed, match="only its workers make tasks"):  # it is this Python after all
                await workers.task(other, 0, 0)

    asyncio.run(run())


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="FOLDER is a virtual environment"):
        make(f"verifiers/{tmp_path}/kuhn-poker")
    with pytest.raises(
        ConfigError, match=r"verifiers/kuhn-poker, in .*named 'verifiers'; install .* -m pip install verif"
    ):
        make("verifiers/kuhn-poker").task(0, 0)


def test_a_python_without_packages_is_named_with_what_it_lacks(tmp_path):
    """-S leaves out all that is installed."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    python.chmod(0o755)

    async def run() -> None:
        async with EnvironmentWorkers([f"verifiers/{tmp_path}/kuhn-poker"]):
            pass

    failed = rf"^{python} -m glm5\.rl\.environments\.worker failed: ModuleNotFoundError: No module named '(\w+)'; "
    with pytest.raises(ConfigError, match=failed + rf"install what is missing there:  {python} -m pip install \1$"):
        asyncio.run(run())


@pytest.mark.long
def test_kuhn_poker_of_verifiers_pays_as_ours():
    if (folder := os.environ.get("GLM5_VERIFIERS")) is None:
        pytest.skip("needs GLM5_VERIFIERS, a virtual environment with verifiers, msgspec and kuhn-poker")
    name = f"verifiers/{folder}/kuhn-poker"
    games = {"pp": ["check", "check"], "bp": ["bet", "fold"], "bb": ["bet", "call"]}
    games |= {"pbp": ["check", "bet", "fold"], "pbb": ["check", "bet", "call"]}

    async def run() -> None:
        async with EnvironmentWorkers([name]) as workers:
            for seed in range(30):
                task = await workers.task(name, seed, 0)
                assert task == await workers.task(name, seed, 0)
                for history, words in games.items():
                    async with await workers.reset(task) as episode:
                        cards, turn = [str(episode.messages).partition("private card: ")[2][0]], Turn()
                        for number, word in enumerate(words):
                            turn = await episode.step(Reply(f"I say [{word}]"))
                            assert turn.is_done == (number == len(words) - 1)
                            if number == 0:
                                cards.append(str(turn.messages).partition("private card: ")[2][:1])
                        assert tuple(cards) in DEALS
                        won = won_by_first(cards, history)
                        assert (turn.rewards, turn.seat_rewards) == ({"payoff": won}, ({"payoff": -won},))

    asyncio.run(run())
