"""A policy learns to write summaries that carry a value through a chain of 96 steps, by the reward of the end alone."""

from pathlib import Path
from statistics import mean

import pytest

from glm5.config.rl import read_rl_recipe
from glm5.rl.environments.memory import CHANCE
from glm5.rl.loop import run
from glm5.rl.watch import read_lines

RECIPE = Path(__file__).parents[2] / "recipes/rl-memory.toml"
TASKS = Path(__file__).parents[2] / "recipes/data/memory-96.jsonl"


def at_the_end(out, *settings) -> tuple[float, float]:
    """Held-out chains of 96 steps before the first step and after the last one."""
    run(read_rl_recipe(RECIPE, (f"out={out}", "records.every=0", f"evaluation.files.chain={TASKS}", *settings)))
    found = [line["eval/chain/mean"] for line in read_lines(out / "metrics.jsonl") if "eval/chain/mean" in line]
    return found[0], found[-1]


@pytest.mark.long
def test_summaries_are_learnt_by_the_reward_of_the_end(tmp_path):
    """The control are summaries that are not trained."""
    joint = [at_the_end(tmp_path / f"joint-{seed}", f"seed={seed}") for seed in range(3)]
    frozen = "rollouts.context.train_summary=false"
    alone = [at_the_end(tmp_path / f"frozen-{seed}", f"seed={seed}", frozen) for seed in range(3)]
    print(f"joint {joint}, frozen {alone}, chance {CHANCE}")
    assert min(end for _, end in joint) >= 0.99
    assert mean(end for _, end in alone) < 0.6
