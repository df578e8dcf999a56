"""A policy learns to use what the environment answers: more reward than the most that is earned without the answers."""

from pathlib import Path
from statistics import mean, median

import pytest

from glm5.config.rl import read_rl_recipe
from glm5.rl.environments.guess import IGNORING_ANSWERS
from glm5.rl.loop import run
from glm5.rl.watch import read_lines

RECIPE = Path(__file__).parents[2] / "recipes/rl-guess.toml"
LAST = 10
"""Steps whose mean reward counts, of 120 or 240 games each."""


def rewards(out, *settings):
    run(read_rl_recipe(RECIPE, (f"out={out}", "records.every=0", *settings)))
    return [line["reward/mean"] for line in read_lines(out / "metrics.jsonl") if "reward/mean" in line]


@pytest.mark.slow
def test_a_short_run_earns_more_than_a_policy_that_ignores_the_answers(tmp_path):
    """The control are its first steps. 0.3 is four standard deviations of 1,200 games above 0.267."""
    found = rewards(tmp_path / "run", "steps=60", "rollouts.group_size=8", "algorithm.entropy=0.02")
    print([round(one, 2) for one in found])
    assert mean(found[:LAST]) < IGNORING_ANSWERS
    assert mean(found[-LAST:]) > 0.31


@pytest.mark.long
def test_the_recipe_with_five_seeds(tmp_path):
    found = [mean(rewards(tmp_path / f"{seed}", f"seed={seed}")[-LAST:]) for seed in range(5)]
    print([round(one, 3) for one in found])
    assert median(found) >= 0.85
    assert min(found) >= 0.75
