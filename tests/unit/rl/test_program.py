"""Agents that are programs: what they make of the policy's replies is trained exactly as it was sampled."""

import asyncio
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from glm5.chat.template import ChatTemplate
from glm5.config.rl import AgentSection
from glm5.rl.environments.protocol import Task, Turn
from glm5.rl.loop import run
from glm5.rl.records.store import Records, read_groups
from glm5.rl.replay import replay
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.program import ProgramHarness
from glm5.serve.gateway import gateway
from tests.support.agents import RandomEngine
from tests.support.rl_recipe import small_recipe
from tests.support.tokenizers import tiny_tokenizer
from tests.support.whole_runs import killing_engine, steps_of

OPEN = partial(gateway, environment=dict(os.environ))
AGENT = Path(__file__).parents[2] / "support" / "asking_agent.py"


def train(folder: Path, *arguments: str, settings: tuple[str, ...] = ()) -> list[dict]:
    """The lines of a run whose policy is played by the agent."""
    command = ", ".join(f'"{one}"' for one in (sys.executable, AGENT, *arguments))
    changes = ('environment.0.name="sort"', "rollouts.max_model_len=256", f"agent.command=[{command}]", *settings)
    run(small_recipe(folder, *changes), open_gateway=OPEN)
    return steps_of(folder / "run")


@pytest.mark.parametrize(
    "dialect", [pytest.param("anthropic", marks=pytest.mark.slow), pytest.param("chat", marks=pytest.mark.long)]
)
def test_training_through_an_api_is_exact(dialect, tmp_path):
    lines = train(tmp_path, dialect, "twice", settings=("steps=2",))
    assert all((line["logp/abs_diff_max"], line["metric/forks"], line["turns/mean"]) == (0, 0, 2) for line in lines)
    assert all(not one.tensors for one in replay(tmp_path / "run", 2))


def test_two_episodes_of_one_seed_have_sessions_of_their_own():
    """An evaluation numbers the tasks of each environment from 1 on, so that two of them have one seed."""
    tokenizer = tiny_tokenizer()
    engine, template = RandomEngine(tokenizer, 0), ChatTemplate.bundled("glm-5.2", tokenizer)
    engines = SimpleNamespace(of=lambda _: engine, held=lambda *_: nullcontext())
    policy: Any = SimpleNamespace(sampling={}, cfg=SimpleNamespace(max_tokens=8), keeps_pages=False, engines=engines)

    class Episode:
        messages = ({"role": "user", "content": "hi"},)

        async def step(self, reply):
            return Turn(is_done=True, rewards={"reward": 1.0})

    async def reset_all(task, count):
        return [Episode() for _ in range(count)]

    async def both(opened):
        cfg = AgentSection.model_validate({"command": ["cat"]})
        chat = TokenChat(template)
        harness = ProgramHarness(policy, cast("Any", SimpleNamespace(reset_all=reset_all)), chat, opened, cfg)
        task = Task("sort", 1, 0, (), {})
        return await asyncio.gather(*(harness.play(task, 1, 1) for _ in range(2)))

    with OPEN(template, tokenizer) as opened:
        found = asyncio.run(both(opened))
    assert [rollout.reward for episodes in found for (rollout,) in episodes] == [1, 1]


@pytest.mark.long
def test_asynchronous_agents(tmp_path):
    settings = ("asynchronous.max_staleness=1", 'algorithm.name="dis"', "steps=4")
    lines = train(tmp_path, "chat", settings=settings)
    assert max(line["staleness/max"] for line in lines) <= 1


@pytest.mark.long
def test_a_program_that_fails_earns_nothing(tmp_path):
    train(tmp_path, "chat", "fails", settings=("steps=1",))
    (one, *_) = [rollout for group in read_groups(Records(tmp_path / "run"), 1) for rollout in group.rollouts]
    assert (one.reward, one.failure) == (0, "harness")
    assert one.failure_reason == "the program ended with code 1: no idea"
    assert one.tree.num_sampled > 0


@pytest.mark.long
def test_an_engine_that_is_killed_is_started_again(tmp_path, monkeypatch, caplog):
    killing_engine(monkeypatch, [9])
    lines = train(tmp_path, "chat")
    assert caplog.text.count("it is started again with the weights of step") == 1
    assert [line["step"] for line in lines] == [1, 2, 3]


@pytest.mark.long
def test_episodes_whose_engine_is_killed_are_played_by_the_other_one(tmp_path, monkeypatch, caplog):
    killing_engine(monkeypatch, [9])
    lines = train(tmp_path, "chat", settings=('rollouts.devices=["cpu", "cpu"]',))
    assert "its requests go on elsewhere" in caplog.text
    assert all(line["logp/abs_diff_max"] == 0 for line in lines)
    assert all(line["group/dropped"] == line.get("env_fail/harness", 0) == 0 for line in lines)
    assert lines[-1]["engines/lost"] == 1


@pytest.mark.long
def test_a_program_that_takes_too_long_is_killed(tmp_path):
    command = f'agent.command=["{sys.executable}", "-c", "import time; time.sleep(100)"]'
    settings = ('environment.0.name="sort"', "agent.timeout_s=1", "steps=1", command)
    with pytest.raises(Exception, match="the program took more than 1 s"):
        run(small_recipe(tmp_path, *settings), open_gateway=OPEN)
