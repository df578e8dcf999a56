"""Rounds of self-improvement by commands: rollouts, the best of them, fine-tuning, and rollouts again."""

import json
import shlex
from pathlib import Path
from statistics import fmean

import pytest

from glm5.cli.main import main
from glm5.rl.watch import FILE, read_lines

RECIPES = Path(__file__).parents[3] / "recipes"
CRASHING = "environment.0.name=guess-crash environment.0.tasks=15"


def run(line: str) -> None:
    assert main(shlex.split(line)) == 0, line


def reward(out: Path) -> tuple[float, float]:
    """(mean reward, mean number of crashes) of all rollouts of a run."""
    lines = [line for line in read_lines(out / FILE) if "reward/mean" in line]
    return fmean(line["reward/mean"] for line in lines), fmean(line["metric/crashes"] for line in lines)


@pytest.mark.long
def test_the_best_rollouts_make_a_better_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seed = 1
    start = f"seed={seed} steps=1 evaluation.every=100 lr=1e-12 final_lr=1e-12 {CRASHING}"
    run(f"rl {RECIPES}/rl-guess.toml --set out=start {start}")
    policy, found = "start/policy", []
    for number in (1, 2, 3):
        run(f"rl {RECIPES}/rl-round.toml --set out=round-{number} seed={seed + number} model.checkpoint={policy}")
        found.append(reward(Path(f"round-{number}")))
        if number == 3:
            break
        run(f"rl export round-{number} --out {number}.jsonl --best 12")
        rows = [json.loads(line) for line in Path(f"{number}.jsonl").read_text().splitlines()]
        for row in rows:
            turns = [one for one in row["messages"] if one["role"] == "assistant"]
            assert all((one["content"] == "crash") == (one.get("weight") == 0) for one in turns)
        files = f"stage.0.data.0.files='[\"{tmp_path}/{number}.jsonl\"]'"
        run(f"train {RECIPES}/sft-round.toml --set out=sft-{number} model.checkpoint={policy} {files}")
        policy = f"sft-{number}/sft/last"
    print(f"{seed=}, (reward, crashes) by round: {found}")
    rewards = [one for one, _ in found]
    assert rewards[1] > rewards[0] + 0.03
    assert rewards[2] > rewards[0] + 0.06
    assert found[2][1] < 0.5 * found[0][1], "what crashed is never learnt"
