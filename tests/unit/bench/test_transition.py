"""The transition: which trainings a recipe is cut into, and what is made of their results."""

import json
from pathlib import Path

import pytest

from glm5.bench.transition.report import ORDER, as_text, document, lines, picture, verdicts
from glm5.bench.transition.run import DENSE, DENSE_MORE, DSA, Done, Row
from glm5.bench.transition.trainings import Transition
from glm5.cli.main import main
from glm5.common.errors import ConfigError
from glm5.config.step import WindowConfig
from glm5.config.train import read_recipe
from tests.support.training import recipe_file, stage

REPO = Path(__file__).parents[3]
STAGES = (stage("short", steps=1), stage("dense", steps=1), stage("warmup", "warmup", 1), stage("sparse", "sparse", 2))
RIGHT = {DENSE: 1.0, DENSE_MORE: 1.0, DSA: 0.99, "SWA, all layers": 0.3, "SWA, all layers, adapted": 0.35}


def transition(tmp_path: Path) -> Transition:
    return Transition(read_recipe(recipe_file(tmp_path, *STAGES), ["model.config.index_topk=8"]), 3, tmp_path)


def done(seed: int, **right: float) -> Done:
    accuracy = RIGHT | right
    rows = [Row(name, seed, accuracy.get(name, 0.6), 1.0, 0.5) for name in ORDER]
    return Done("all", seed, rows, seconds=10.0, cpu_seconds=7.0)


def test_every_part_begins_where_dense_attention_ended(tmp_path):
    found = transition(tmp_path)
    dense, dsa = found.dense(), found.dsa()
    assert [each.name for each in dense.stage] == ["short", "dense"]
    assert [each.kind for each in dsa.stage] == ["warmup", "sparse"]
    window = WindowConfig(size=4, pattern="S")
    for part in (dsa, found.control("more", None), found.control("swa", window)):
        assert part.model.checkpoint == str(tmp_path / "seed-3" / "dense" / "dense" / "last")
        assert (part.model.preset, part.model.config, part.seed) == (None, {}, 3)
    assert len({found.dsa().folder, found.dense().folder, found.control("swa", window).folder}) == 3


def test_controls_train_as_the_sparse_stage_does(tmp_path):
    found = transition(tmp_path)
    window = WindowConfig(size=4, pattern="S")
    (control,) = found.control("swa", window).stage
    assert control.window == window
    assert control.reads_all
    same = {"kind", "keys", "window"}
    assert control.model_dump(exclude=same) == found.sparse.model_dump(exclude=same)


@pytest.mark.parametrize(
    "kinds", [("dense", "sparse"), ("dense", "warmup"), ("sft", "warmup", "sparse"), ("warmup", "sparse")]
)
def test_a_recipe_without_a_transition_is_refused(kinds, tmp_path):
    of = {"dense": "pretrain"}
    stages = [stage(kind, of.get(kind, kind), 1) for kind in kinds]
    with pytest.raises(ConfigError, match="needed: pretrain or midtrain, then warmup, then sparse"):
        Transition(read_recipe(recipe_file(tmp_path, *stages)), 0, tmp_path)


def test_lines_are_means_over_seeds(tmp_path):
    found = lines([done(0), done(1, **{DSA: 0.97, DENSE_MORE: 0.98})])
    assert [line.name for line in found] == list(ORDER)
    dsa = next(line for line in found if line.name == DSA)
    assert (dsa.accuracy, dsa.each) == (pytest.approx(0.98), (0.99, 0.97))
    assert dsa.spread == pytest.approx(0.02 / 2**0.5)
    assert dsa.gap == pytest.approx(0.01), "each seed beside its own dense attention"
    assert as_text(found).splitlines()[0].split()[0] == "attention"
    assert picture(found).count("<circle") == 2 * len(ORDER)
    assert document([done(0), done(1)], {}, 5.0)["cpu_seconds"] == 14.0


@pytest.mark.parametrize(
    ("right", "shown"),
    [
        ({}, [True, True, True]),
        ({DENSE: 0.92}, [False, True, True]),
        ({DSA: 0.975}, [True, False, True]),
        ({"SWA, all layers, adapted": 0.61}, [True, True, False]),
        ({"SWA, all layers": 0.61}, [True, True, False]),
    ],
)
def test_verdicts_say_what_is_not_shown(right, shown):
    assert list(verdicts(lines([done(0, **right)])).values()) == shown


def test_the_recipe_of_the_repository_holds_a_transition(tmp_path):
    found = Transition(read_recipe(REPO / "recipes" / "needle-dsa.toml"), 0, tmp_path)
    assert found.sparse.seq_len == 256
    assert found.recipe.model.config["index_topk"] == 16


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["bench", "transition", str(recipe_file(tmp_path, *STAGES)), "--window", "16", "--held-out", "2"]
    assert main([*argv, "--out", str(out), "--processes", "2", "--set", "checkpoints.held_out=1"]) == 0
    shown, found = capsys.readouterr().out, json.loads((out / "transition.json").read_text())
    assert "NOT SHOWN: dense attention is right" in shown
    assert [line["name"] for line in found["lines"]] == list(ORDER)
    assert "<svg" in (out / "transition.html").read_text()
    assert "sparse 2/2" in (out / "seed-0" / "dsa" / "log.txt").read_text()
