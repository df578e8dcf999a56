"""The table on a terminal: what it says, that it is drawn over itself, and TensorBoard's absence named."""

import io
import sys
from types import SimpleNamespace

import pytest

from glm5.common.errors import MissingExtra
from glm5.train import metrics, progress_table
from glm5.train.metrics import MetricsLog
from glm5.train.progress_table import ProgressTable
from tests.support.training import recipe

FIGURES = {"loss": 2.0, "index": 0.5, "tokens/s": 123456.0, "lr": 1e-3, "excess load": 0.25}


@pytest.fixture
def terminal(monkeypatch):
    """A stream that is a terminal of 100 columns, and a clock that stands still until it is told."""
    monkeypatch.setattr(progress_table, "columns", lambda _stream: 100)
    return io.StringIO(), SimpleNamespace(now=0.0)


def test_the_table_says_what_is_known(terminal):
    stream, clock = terminal
    table = ProgressTable("dsa (sparse)", 10, 0, stream, lambda: clock.now)
    for step in (1, 2):
        clock.now += 3.0
        table.step(step, FIGURES | {"loss": 2.0 * step})
    head, *rest = table.lines()
    assert head == "dsa (sparse)  2/10 [######........................]  3 s a step, ETA 00:24"
    assert rest[0].split() == ["loss", "4", "mean", "3", "tokens/s", "123,456"]
    assert rest[1].split() == ["index", "0.5", "mean", "0.5", "lr", "0.001"]
    assert rest[2].split() == ["excess", "load", "0.25", "mean", "0.25"]


def test_it_is_drawn_over_itself_until_left(terminal):
    stream, clock = terminal
    table = ProgressTable("dsa (sparse)", 10, 0, stream, lambda: clock.now)
    table.step(1, FIGURES)
    table.step(2, FIGURES)
    assert stream.getvalue().count("dsa (sparse)") == 1, "not more often than an eye sees"
    clock.now = 5.0
    table.held_out({"attention recall": 0.97})
    assert f"\x1b[{len(table.lines())}F\x1b[2Kdsa" in stream.getvalue()
    assert "attention recall" in stream.getvalue()
    table.release()
    clock.now = 6.0
    table.step(3, FIGURES)
    assert stream.getvalue().rpartition("dsa")[0].endswith("\x1b[J\x1b[2K")


def test_a_run_on_a_terminal_shows_the_table(terminal, monkeypatch, tmp_path):
    stream, _ = terminal
    monkeypatch.setattr(metrics, "columns", lambda _stream: 100)
    stage = recipe(tmp_path, "out").stage[0]
    with MetricsLog(tmp_path, stage, 0, stream) as watching:
        watching.step(1, FIGURES)
        watching.held_out(1, {"held-out loss": 1.5})
    assert "dense (pretrain)  1/6" in stream.getvalue()
    assert "held-out loss" in stream.getvalue()


def test_tensorboard_is_written_or_its_absence_named(monkeypatch, tmp_path):
    stage = recipe(tmp_path, "out").stage[0]
    written = []
    writer = SimpleNamespace(add_scalar=lambda *given: written.append(given), close=lambda: written.append("closed"))
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtra, match=r"glm5\[tensorboard\]"):
        MetricsLog(tmp_path, stage, 0, io.StringIO(), tensorboard=True)
    module = SimpleNamespace(SummaryWriter=lambda _folder: writer)
    monkeypatch.setattr(metrics, "require", lambda _name, _extra: module)
    with MetricsLog(tmp_path, stage, 0, io.StringIO(), tensorboard=True) as watching:
        watching.step(1, {"loss": 2.0})
    assert written == [("loss", 2.0, 1), "closed"]
