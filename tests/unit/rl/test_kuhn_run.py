"""Kuhn poker in self-play: a shortened run of the recipe comes near equilibrium, and not with advantages divided by the
standard deviation."""

from pathlib import Path

import pytest

from glm5.config.rl import read_rl_recipe
from glm5.rl.loop import run
from tests.support.kuhn_curve import distances

RECIPE = Path(__file__).parents[3] / "recipes/rl-kuhn.toml"
STEPS = 150


@pytest.mark.long
def test_self_play_comes_near_equilibrium(tmp_path):
    found = dict[str, float]()
    for name in ("grpo-no-std", "grpo"):
        run(read_rl_recipe(RECIPE, (f"out={tmp_path / name}", f"steps={STEPS}", f'algorithm.name="{name}"')))
        found[name], last = distances(tmp_path / name)
        print(f"{name}: NashConv/2 of the average {found[name]:.4f}, of the last policy {last:.4f}")
    assert found["grpo-no-std"] < 0.08
    assert found["grpo"] > 0.1
