"""`glm5 bench off-policy`: how old rollouts are, what a cell sets, how a table goes on. Most runs are scripted."""

import json
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from glm5.bench import off_policy
from glm5.bench.off_policy import RATES, ROWS, SEEDS, STALENESS, Job, LaggedRun, measure, play
from glm5.common.errors import ConfigError
from glm5.config.bench_off_policy import BenchOffPolicyConfig
from glm5.rl.loop import Run
from tests.support.rl_recipe import recipe_file

RECIPE = Path(__file__).parents[3] / "recipes" / "rl-off-policy.toml"


def settings_in(folder: Path, **more) -> BenchOffPolicyConfig:
    return BenchOffPolicyConfig(**{"recipe": str(RECIPE), "out": str(folder), **more})


@pytest.mark.parametrize(("push_every", "lag"), [(1, 0), (1, 2), (1, 8), (4, 0), (4, 2)])
def test_rollouts_have_weights_of_exactly_so_many_pushes_ago(tmp_path, push_every, lag):
    """The weights of a step are its number: those of rollouts are computed by hand."""
    job = LaggedRun.__new__(LaggedRun)
    given = (f"asynchronous.push_every={push_every}", f"asynchronous.max_staleness={lag}", "steps=30")
    job.recipe = Job(0, 0, 1.0, 1).recipe(settings_in(tmp_path)).model_validate(read(tmp_path, *given).model_dump())
    job._pushed = {}
    live = torch.zeros(1)
    job.trainer = type("Trainer", (), {"weights": lambda self: {"w": live}})()
    for number in range(31):
        job.number = number
        live.fill_(number)  # in place, as an optimizer does
        for _ in range(2):  # an engine that ends asks again
            version, weights = job._due()
        want = 30 if number == 30 else push_every * max(0, number // push_every - lag)
        assert weights["w"].item() == want
        assert number == 30 or version * push_every == want
        assert len(job._pushed) <= lag + 1
    assert Run._due(job)[1]["w"].item() == 30  # the control


def read(tmp_path, *given):
    from glm5.config.rl import read_rl_recipe

    return read_rl_recipe(RECIPE, given)


def test_cells_set_what_they_say(tmp_path):
    settings = settings_in(tmp_path)
    found = {}
    for row, (name, push_every, resets) in enumerate(ROWS):
        recipe = Job(row, 2, 3.0, 5).recipe(settings)
        assert recipe.asynchronous.push_every == push_every
        assert recipe.asynchronous.max_staleness == 2
        assert recipe.seed == 5
        assert recipe.lr == pytest.approx(4.5e-3)
        assert recipe.resets_after(7) == resets or push_every == 1
        assert recipe.reset_optimizer == resets
        assert recipe.rollouts.groups * recipe.rollouts.group_size == 240
        found[name] = (recipe.algorithm.name, recipe.rollouts.group_size, recipe.algorithm.parameters)
    assert found["sao"] == ("sao", 1, {})
    assert found["none"] == ("reinforce", 16, {})
    assert found["dis (0.2, 0.28)"] == ("dis", 16, {"eps_low": 0.2, "eps_high": 0.28})
    assert len({Job(row, s, 1.0, 1).recipe(settings).out for row in range(len(ROWS)) for s in STALENESS}) == 39


class Pool:
    """Plays in this process."""

    def __init__(self, *_given, **_more) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *_error) -> None: ...

    def submit(self, function, *given):
        future = Future()
        future.set_result(function(*given))
        return future


def test_a_table_goes_on_and_has_the_best_rates(tmp_path, monkeypatch):
    played = []

    def scripted(job, settings):
        played.append(job)
        assert len(played) < 60, "killed"
        reward = (1.0 - abs(job.rate - 1.0) / 10) - 0.01 * job.seed - 0.1 * job.staleness
        return {"step": 1, "job": job, "reward": reward, "seconds": 72.0, "time/step": 0.5}

    monkeypatch.setattr(off_policy, "play", scripted)
    monkeypatch.setattr(off_policy, "ProcessPoolExecutor", Pool)
    said = []
    settings = settings_in(tmp_path, rows="dis (0.3", jobs=2)
    with pytest.raises(AssertionError, match="killed"):
        measure(settings, said.append)
    assert said == ["144 of 144 runs are missing, about 110 s each: 2.20 h, 2 at a time"]
    file = tmp_path / "runs.jsonl"
    before = file.read_text() + '{"step": 1, "job'  # the line that was being written
    file.write_text(before)
    played.clear()
    monkeypatch.setattr(off_policy, "play", lambda job, cfg: (scripted(job, cfg), played.clear())[0])
    found = measure(settings, said.append)
    assert " of 144 runs are missing, about 72 s each" in said[1]
    assert int(said[1].split()[0]) < 144
    jobs = [tuple(map(str, json.loads(line)["job"])) for line in file.read_text().splitlines() if line.endswith("}")]
    assert len(set(jobs)) == 6 * 3 * (len(RATES) + len(SEEDS))
    lines = found.splitlines()
    assert lines[2] == "| dis (0.3, 5.0) | 1 | no | 0.97 ± 0.02 (x 1) | 0.77 ± 0.02 (x 1) | 0.17 ± 0.02 (x 1) |"
    assert len([line for line in lines if line.startswith("| dis")]) == 6
    assert measure(settings, said.append) == found
    assert said[2].startswith("0 of 144 runs")
    measure(settings_in(tmp_path, rows="dis (0.3", set=("steps=50",)), said.append)  # the control: another recipe
    assert said[3].startswith("144 of 144")


def test_an_unknown_row_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"rows: got ppo; allowed: how one of none, grpo, .*, sao begins"):
        measure(settings_in(tmp_path, rows="ppo"), lambda _: None)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(number, marks=pytest.mark.slow if name == "sao" else pytest.mark.long)
        for number, (name, *_) in enumerate(ROWS)
        if name in ("none", "sao")
    ],
)
def test_a_run_is_played_with_old_weights(tmp_path, row):
    folder = tmp_path / "out"
    settings = settings_in(folder, recipe=str(recipe_file(tmp_path)), set=("evaluation.every=5", "steps=5"))
    line = play(Job(row, 2, 1.0, 1), settings)
    assert line["error"] == ""
    assert line["staleness/mean"] == 2.0
    assert len(line["curve"]) == line["step"] == 5
    assert 0 <= line["reward"] <= 1
    assert list(folder.iterdir()) == []
    if ROWS[row][0] == "none":
        failed = play(Job(row, 0, 1e30, 1), settings)
        assert failed["reward"] == 0
