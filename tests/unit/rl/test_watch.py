"""What is told of a run: lines of JSON, a line or a table on the terminal, TensorBoard's and Weights & Biases' own."""

import io
import json
import math
import os
from types import SimpleNamespace

import pytest

from glm5.common.errors import MissingExtra
from glm5.config.rl import RLRecipe
from glm5.rl.report import comparison, table
from glm5.rl.view.timeline import timeline
from glm5.rl.waits import FIGURES as SHARES
from glm5.rl.waits import PREDICTED
from glm5.rl.watch import FILE, Watch, read_lines, read_metrics
from glm5.train.metrics import check_extras


def recipe_of(**changes) -> RLRecipe:
    values = {"name": "a", "steps": 3, "lr": 1.0, "model": {"preset": "nano"}, "environment": [{"name": "guess"}]}
    return RLRecipe.model_validate(values | changes)


FIGURES = {"reward/mean": 0.25, "entropy": 1 / 3, "time/train": 2.0, "perf/mfu": 0.4}


def test_lines_of_a_log(tmp_path):
    stream = io.StringIO()
    with Watch(tmp_path, recipe_of(), 0, stream) as of:
        of.evaluated(0, {"eval/mean": 0.1})
        of.step(1, FIGURES)
        of.release()
    assert stream.getvalue().splitlines()[0] == "a 0: eval/mean 0.1"
    assert stream.getvalue().splitlines()[1].startswith("a 1/3: reward/mean 0.25, entropy 0.3333, ETA ")
    assert read_lines(tmp_path / FILE) == [{"step": 0, "eval/mean": 0.1}, {"step": 1, **FIGURES, "entropy": 0.333333}]


def test_a_hacked_proxy_is_shown_and_told_once(tmp_path, caplog):
    def figures(proxy: float, true: float) -> dict[str, float]:
        return {"metric/proxy": proxy, "metric/true": true, "proxy/std": 0.5, "true/std": 0.25}

    lines = [(0.0, 0.5), (0.4, 0.5), (0.25, 0.4), (1.0, 0.25)]
    for first, (begin, end) in ((0, (0, 3)), (3, (3, 4)), (3, (3, 4))):  # resumed twice after step 3
        with Watch(tmp_path, recipe_of(), first, io.StringIO()) as of:
            for step in range(begin, end):
                of.step(step + 1, figures(*lines[step]))
    found = [line["proxy/divergence"] for line in read_lines(tmp_path / FILE)]
    assert found == pytest.approx([0.0, 0.8, 0.9, 3.0])
    told = [one.getMessage() for one in caplog.records if "hacked" in one.getMessage()]
    assert len(told) == 2  # of the last step, once in each run
    assert "proxy has risen from 0 to 1 and the true reward fallen from 0.5 to 0.25" in told[0]


def test_repeated_and_foreign_lines_are_left_out(tmp_path):
    lines = ['{"step": 1}', "[1]", '{"step": "x"}', '{"step": 2}', '{"step": 3', '{"step": 4}']
    (tmp_path / FILE).write_text("\n".join(lines))
    assert read_lines(tmp_path / FILE) == [{"step": 1}, {"step": 2}]
    with Watch(tmp_path, recipe_of(), 1, io.StringIO()):
        pass
    assert read_lines(tmp_path / FILE) == [{"step": 1}]


ODD = (None, "x", [], {}, True, math.nan, math.inf, -1, 0, 1e308, 10**400)


def test_figures_of_a_damaged_file_are_shown_without_what_is_no_number(tmp_path):
    """A run ends with its report, so that a damaged line must not end it with an error."""
    names = [*SHARES, "wait/environment", "staleness/checked", "staleness/dropped", "time/train", "reward/mean"]
    sound = dict.fromkeys([*names, *(PREDICTED + name for name in SHARES)], 0.5)
    for name in sound:
        for odd in ODD:
            damaged = [{"step": 1, **sound, name: odd}, {"step": 2, **sound}, {"step": 10**400}]
            (tmp_path / FILE).write_text("\n".join(map(json.dumps, damaged)))
            lines = read_metrics(tmp_path)
            assert [line["step"] for line in lines] == [1, 2]
            assert "0.5" in table(lines) + comparison(lines) + timeline(lines)
        without = [{"step": 1, **{one: value for one, value in sound.items() if one != name}}]
        table(without), comparison(without), timeline(without)
    with pytest.raises(TypeError):  # the control: as the file has it
        table([{"step": 1, **sound, "reward/mean": None}])


def test_a_wide_terminal_gets_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr("glm5.train.progress_table.terminal_size", lambda _: os.terminal_size((120, 40)))
    stream = io.StringIO()
    with Watch(tmp_path, recipe_of(), 0, stream) as of:
        of.step(3, FIGURES)
        of.evaluated(3, {"eval/mean": 0.5})
    lines = stream.getvalue().rpartition("\x1b[")[0].split("\x1b[2K")
    assert "a  3/3 [######" in lines[1]
    assert lines[2].split() == ["reward/mean", "0.25", "mean", "0.25", "time/train", "2"]
    assert "eval/mean" in stream.getvalue()


def test_extras_get_every_figure(tmp_path, monkeypatch):
    found = []
    writer = SimpleNamespace(add_scalar=lambda *one: found.append(one), close=lambda: found.append("closed"))
    board = SimpleNamespace(SummaryWriter=lambda folder: writer)
    run = SimpleNamespace(log=lambda values, step: found.append((step, values)), finish=lambda: found.append("ended"))
    monkeypatch.setattr("glm5.train.metrics.check_board", lambda: board)
    monkeypatch.setattr("glm5.train.metrics.check_wandb", lambda: SimpleNamespace(init=lambda **about: run))
    recipe = recipe_of(tensorboard=True, wandb=True)
    check_extras(recipe)
    with Watch(tmp_path, recipe, 0, io.StringIO()) as of:
        of.step(1, {"reward/mean": 0.25})
    assert found == [("reward/mean", 0.25, 1), (1, {"reward/mean": 0.25}), "closed", "ended"]


def test_a_missing_extra_is_named_before_the_training(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"glm5\[wandb\]"):
        check_extras(recipe_of(wandb=True))
    assert json.dumps(check_extras(recipe_of())) == "null"
