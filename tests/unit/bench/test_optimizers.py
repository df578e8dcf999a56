"""`python -m glm5.bench.optimizers`: search, runs over seeds, table and picture; what was found is not found again."""

import json
from pathlib import Path

import pytest

from glm5.bench.optimizers.__main__ import main
from glm5.bench.optimizers.report import lines, picture, table
from glm5.bench.optimizers.runs import WAYS, Done, Given, Plan
from glm5.config.tensors import count_parameters
from glm5.config.train import read_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
RECIPE = """
name = "optimizers"
device = "cpu"
threads = 1
model = { preset = "tiny", tokenizer_files = ["text.txt"] }
losses = { mtp_depth = 0 }
checkpoints = { every = 1000, evaluate_every = 1, held_out = 1 }
[[stage]]
name = "text"
kind = "pretrain"
steps = 2
seq_len = 32
sequences = 2
lr = 1e-3
data = [{ kind = "files", files = ["text.txt"], held_out = 0.2 }]
"""


def done(way: str, seed: int, loss: float, *, rate: float = 1e-3, alone: bool = False) -> Done:
    curve = [(100, loss + 2), (200, loss + 1), (300, loss)]
    return Done(Plan(way, rate, seed, 3, alone=alone), curve, curve, 0.05, 0.01)


@pytest.mark.long
def test_a_whole_comparison(tmp_path, capsys):
    words = " ".join(f"word{i % 37} and {i % 11}" for i in range(400))
    (tmp_path / "text.txt").write_text(words)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    out = tmp_path / "out"
    sizes = ["--seeds", "0", "1", "--muon-rates", "1e-3", "--adamw-rates", "1e-3", "3e-3", "--search-steps", "1"]
    command = [str(tmp_path / "recipe.toml"), "--out", str(out), *sizes, "--timed-steps", "1", "--processes", "1"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "adamw-0.003-seed-0-1-steps: held-out loss" in said
    document = json.loads((out / "optimizers.json").read_text())
    assert [line["way"] for line in document["lines"]] == list(WAYS)
    assert len(document["runs"]) == 4 + 2 * len(WAYS) + len(WAYS)
    split, whole, _ = (line["each"]["0"] for line in document["lines"])
    assert split != whole
    assert (out / "optimizers.svg").read_text().count("<polyline") == len(WAYS)
    times = {file: file.stat().st_mtime_ns for file in out.glob("*-steps*.json")}
    assert len(times) == len(document["runs"])
    assert main(command) == 0
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert not list(out.glob(".*-seed-*"))


def test_means_and_spread_over_seeds():
    runs = [done(way, seed, 1.0 + seed / 10) for way in WAYS for seed in (0, 1, 2)]
    searched = [done(way, 0, loss, rate=rate) for way in WAYS for rate, loss in ((5e-4, 2.0), (1e-3, 1.5), (2e-3, 3.0))]
    found = lines(searched, runs, [done(way, 0, 5.0, alone=True) for way in WAYS])
    assert [line.mean for line in found] == pytest.approx([1.1] * 3)
    assert [line.spread for line in found] == pytest.approx([0.1] * 3)
    assert [line.half_way for line in found] == pytest.approx([2.1] * 3)
    assert not found[0].at_an_end
    assert "0.0005: 2.000, 0.001: 1.500, 0.002: 3.000\n" in table(found)
    assert picture(runs).count("<polygon") == len(WAYS)


def test_matrices_have_the_planned_rate(tmp_path):
    given = Given(RECIPES / "optimizers.toml", (), tmp_path)
    for way in WAYS:
        recipe = given.read(*Plan(way, 4e-4, 1, 50).settings(tmp_path, given.read().stage[0].lr))
        assert recipe.optimizer.matrix_lr * recipe.stage[0].lr == pytest.approx(4e-4)
        assert (recipe.optimizer.kind == "adamw") == (way == "AdamW")
        assert recipe.optimizer.split == (way == "Muon Split")


def test_sizes_are_those_the_recipes_name():
    sizes = {name: read_recipe(RECIPES / f"{name}.toml").model.architecture() for name in ("optimizers", "active-100m")}
    assert round(count_parameters(sizes["optimizers"]).total / 1e6) == 30
    large = sizes["active-100m"]
    assert round(count_parameters(large).total / 1e6) == 472
    assert round((count_parameters(large).active + large.vocab_size * large.hidden_size) / 1e6) == 102
