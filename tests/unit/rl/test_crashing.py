"""A policy gains nothing by crashing its tool: what a crash costs, and how often a trained policy crashes."""

from contextlib import suppress
from pathlib import Path
from statistics import mean

import pytest

from glm5.common.errors import ConfigError, TrainingError
from glm5.config.rl import read_rl_recipe
from glm5.rl.environments.play import play
from glm5.rl.environments.protocol import Reply
from glm5.rl.loop import run
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.watch import read_lines
from tests.unit.rl.crashing import CAUSES, Crashing

RECIPE = Path(__file__).parents[3] / "recipes/rl-guess.toml"


@pytest.fixture(autouse=True)
def _boxes() -> None:
    try:
        choose_backend()
    except ConfigError as error:
        pytest.skip(str(error))


def played(environment, said):
    replies = iter(said)
    return play(environment, environment.task(7, 0), lambda _: Reply(next(replies)))


@pytest.mark.parametrize("action", CAUSES)
def test_a_crash_is_told_counted_and_costs_a_turn(action):
    game = played(Crashing(), [action, "8"])
    assert game.conversations[0][2]["content"] == "error"
    assert game.rewards == [1.0]
    assert {name for name, count in game.last.metrics.items() if count and "/" in name} == {f"crash/{CAUSES[action]}"}
    assert played(Crashing(), [action] * 4).rewards == [0.0]


def shares(out, environment):
    """The share of rollouts that crash, step by step of a short run."""
    settings = ["steps=40", "rollouts.max_tokens=8", "rollouts.group_size=12", f"out={out}"]
    name = f'environment.0.name="tests.unit.rl.crashing:{environment}"'
    with suppress(TrainingError):  # where nearly all are left out, nothing is left to train on
        run(read_rl_recipe(RECIPE, (*settings, name, "seed=1")))
    lines = [line for line in read_lines(out / "metrics.jsonl") if "reward/mean" in line]
    rollouts = [12 * (15 + line["group/refilled"]) for line in lines]
    failed = [line.get("env_fail/sandbox", 0) / count for line, count in zip(lines, rollouts, strict=True)]
    return [share + line.get("metric/crashed", 0) for share, line in zip(failed, lines, strict=True)], sum(failed)


@pytest.mark.long
def test_crashes_become_rare_unless_they_are_left_out(tmp_path):
    for environment in ("Crashing", "Excluding"):
        share, failed = shares(tmp_path / environment, environment)
        first, last = mean(share[:5]), mean(share[-5:])
        print(f"{environment}: {len(share)} steps, share of rollouts that crash {first:.3f}, at the end {last:.3f}")
        print([round(one, 3) for one in share])
        if environment == "Crashing":
            assert not failed
            assert last < first / 2
        else:
            assert last > 2 * first
