"""`glm5 bench rl`: what is refused, how sides are tuned and compared. TRL's side is a scripted program."""

import json
import os
import sys
from pathlib import Path

import pytest

from glm5.bench.rl import run as bench
from glm5.bench.rl.report import document, table
from glm5.bench.rl.sides import Side, trl
from glm5.bench.rl.trl_run import settings
from glm5.cli.main import main
from glm5.common.errors import ConfigError, GlmError
from glm5.config.bench_rl import BenchRLConfig
from glm5.config.rl import read_rl_recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "rl-sort.toml"
PROGRAM = """
import json, sys, time
job = json.load(open(sys.argv[1]))
if job["choice"]["how"] == "wrong":
    sys.exit("no such back end")
def write(**line):
    file.write(json.dumps(line) + "\\n")
    file.flush()
with open(job["out"] + "/metrics.jsonl", "w") as file:
    write(step=0)
    for step in range(1, job["steps"] + 1):
        write(**{"step": step, "time/step": job["choice"]["seconds"], "reward/mean": min(1, step / 10),
                 "perf/rollout_tok_s": job["speed"] * 100, "perf/train_tok_s": job["speed"] * 1000})
"""


def scripted(name: str, **choices: list) -> Side:
    return Side(name, [sys.executable, "-S", "-c", PROGRAM], choices)


@pytest.fixture
def no_model(monkeypatch):
    """Jobs of the scripted program, without a checkpoint."""

    def told(_recipe, _checkpoint, folder, steps, _seed, choice):
        speed = 3 if "glm5" in str(folder) else 1
        return {"out": str(folder), "steps": steps, "choice": choice, "speed": speed}

    monkeypatch.setattr(bench, "_checkpoint", lambda _recipe, folder: folder)
    monkeypatch.setattr(bench, "job", told)


def compare(tmp_path, **peer: list):
    recipe, cfg = read_rl_recipe(RECIPE, ("steps=12",)), BenchRLConfig(seeds=(0, 1), out=str(tmp_path))
    sides = [scripted("glm5", how=["well"], seconds=[0.5]), scripted("TRL 1", **peer)]
    said: list[str] = []
    measured = bench.measure(sides, recipe, cfg, dict(os.environ), said.append)
    return document(cfg, recipe, measured), measured, said


def test_sides_are_tuned_and_compared(tmp_path, no_model):
    found, (_, peer), said = compare(tmp_path, how=["well", "wrong"], seconds=[2.0, 1.0, 3.0])
    assert peer.choice == {"how": "well", "seconds": 1.0}
    assert [result for _, result in peer.tried if isinstance(result, float)] == [2.0, 1.0, 3.0]
    assert any("no such back end" in line for line in said)
    assert found["ratios"]["rollouts, median"] == found["ratios"]["training, fastest"] == 3
    assert found["sides"][0]["steps_to_reward"] == [10, 10]  # the mean of steps 6 to 10
    assert (found["final_reward_difference"], found["final_reward_spread"]) == (0, 0)
    assert json.loads(json.dumps(found))["recipe"]["steps"] == 12
    shown = table(found)
    assert "rollouts, tokens/s (fastest step)  300 (300)" in shown
    assert "TRL 1: how well, seconds 1.0" in shown
    assert "final reward: difference +0.000, within the spread 0.000 of the seeds" in shown


def test_a_side_that_never_works_is_an_error(tmp_path, no_model):
    with pytest.raises(GlmError, match=r"TRL 1: no choice works; .*ended with code 1; it said last: no such"):
        compare(tmp_path, how=["wrong"], seconds=[1.0])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algorithm.entropy=0.01", "--against trl: algorithm.entropy: got 0.01; allowed: 0.0, which both sides"),
        ("optimizer.kind=muon", "--against trl: optimizer.kind: got muon; allowed: adamw"),
        ("environment.0.name=guess", r"--against trl: needs one environment of one turn, .*; got turns \[4\]"),
    ],
)
def test_what_trl_would_do_otherwise_is_refused(setting, said):
    with pytest.raises(ConfigError, match=said):
        trl(read_rl_recipe(RECIPE, (setting,)), sys.executable, {})


def test_without_trl_the_error_says_how_to_get_it(tmp_path, capsys):
    assert main(["bench", "rl", str(RECIPE), "--against", "trl", "--peer-python", "no/python"]) == 1
    assert capsys.readouterr().err == (
        "glm5: error: no/python is no Python with TRL: run  no/python -m pip install 'trl>=1.16' 'transformers>=5.23'  "
        "or name another interpreter with --peer-python\n"
    )


def test_settings_of_trl_are_those_of_the_recipe():
    recipe = json.loads(read_rl_recipe(RECIPE, ("seed=5", "lr=0.01")).model_dump_json())
    found = settings(recipe, {"backend": "generate, static cache", "micro_batch": 64})
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 16 * 16
    assert (found["num_generations"], found["seed"], found["learning_rate"]) == (16, 5, 0.01)
    assert (found["adam_beta1"], found["adam_beta2"], found["max_completion_length"]) == (0.5, 0.95, 8)
    assert found["cache_implementation"] == "static"


def test_processor_time_is_that_of_the_whole_family():
    assert bench.processor_seconds(os.getpid()) > 0
