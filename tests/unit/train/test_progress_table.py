"""The table on a terminal: what it says, that it is drawn over itself; TensorBoard and Weights & Biases."""

import io
import logging
import os
import re
import sys
from types import SimpleNamespace

import pytest

from glm5.common.errors import MissingExtra, TrainingError
from glm5.train import metrics, progress_table
from glm5.train.metrics import MetricsLog
from glm5.train.progress_table import ProgressTable
from tests.support.training import recipe

FIGURES = {"loss": 2.0, "index": 0.5, "tokens/s": 123456.0, "lr": 1e-3, "excess load": 0.25}


@pytest.fixture
def terminal(monkeypatch):
    """A stream that is a terminal of 100 columns, and a clock that stands still until it is told."""
    monkeypatch.setattr(progress_table, "terminal_size", lambda _stream: os.terminal_size((100, 40)))
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


def lines_on_screen(written: str, rows: int = 40) -> list[str]:
    """What a terminal shows of it, above the cursor's last line; longer than `rows`, it has scrolled."""
    lines, at = [""], 0
    for code, text in re.findall(r"(\x1b\[\d*[FKJ])|([^\x1b\n]+|\n)", written):
        if code.endswith("F"):
            at = max(at - int(code[2:-1]), len(lines) - rows, 0)
        elif code.endswith("K"):
            lines[at] = ""
        elif code.endswith("J"):
            del lines[at + 1 :]
        elif text == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        else:
            lines[at] += text
    return lines


def test_a_run_on_a_terminal_shows_the_table_once(terminal, tmp_path):
    """Whatever is written in between: the lines of an evaluation, of a log, of a signal."""
    stream, _ = terminal
    of = recipe(tmp_path, "out")
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("glm5")
    logger.addHandler(handler)
    try:
        with MetricsLog(tmp_path, of, of.stage[0], 0, stream) as watching:
            for step in range(1, 6):
                watching.step(step, FIGURES)
                watching.held_out(step, {"held-out loss": 1.5})
                if step == 2:
                    logging.getLogger("glm5.train.loop").warning("left out")
        before = len(stream.getvalue())
        logger.warning("afterwards")
        assert stream.getvalue()[before:] == "afterwards\n"
    finally:
        logger.removeHandler(handler)
    shown = lines_on_screen(stream.getvalue())
    assert [line.split()[2] for line in shown if "dense (pretrain)" in line] == ["2/6", "5/6"]
    assert sum("held-out loss" in line for line in shown) == 2
    assert shown[shown.index("left out") - 1].startswith("excess load")
    assert not handler.filters


def test_a_table_of_more_lines_than_the_terminal_is_drawn_over_itself(terminal, monkeypatch):
    stream, clock = terminal
    monkeypatch.setattr(progress_table, "terminal_size", lambda _stream: os.terminal_size((100, 3)))
    table = ProgressTable("dsa (sparse)", 10, 0, stream, lambda: clock.now)
    for step in range(1, 6):
        clock.now += 5.0
        table.step(step, FIGURES)
    assert sum("dsa (sparse)" in line for line in lines_on_screen(stream.getvalue(), rows=3)) == 1


def test_tensorboard_and_weights_and_biases_get_every_figure(monkeypatch, tmp_path):
    """The same names and steps; a package that is missing is named."""
    of = recipe(tmp_path, "out")
    both = of.model_copy(update={"tensorboard": True, "wandb": True})
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtra, match=rf"glm5\[{name}\]"):
            MetricsLog(tmp_path, of.model_copy(update={name: True}), of.stage[0], 0, io.StringIO())
    written, begun, logged = [], {}, []
    writer = SimpleNamespace(add_scalar=lambda *given: written.append(given), close=lambda: written.append("closed"))
    board = SimpleNamespace(SummaryWriter=lambda _folder: writer)
    run = SimpleNamespace(log=lambda values, step: logged.append((values, step)), finish=lambda: logged.append("ended"))
    wandb = SimpleNamespace(init=lambda **about: begun.update(about) or run, Error=OSError)
    monkeypatch.setattr(metrics, "require", lambda name, _extra: wandb if name == "wandb" else board)
    with MetricsLog(tmp_path, both, of.stage[0], 0, io.StringIO()) as watching:
        watching.step(1, {"loss": 2.0})
        watching.held_out(1, {"held-out loss": 3.0, "bits per byte": 1.0})
    assert written == [("loss", 2.0, 1), ("held-out loss", 3.0, 1), ("bits per byte", 1.0, 1), "closed"]
    assert logged == [({"loss": 2.0}, 1), ({"held-out loss": 3.0, "bits per byte": 1.0}, 1), "ended"]
    assert (begun["project"], begun["group"], begun["name"]) == ("glm5-train", "small", "small dense")
    assert (begun["dir"], begun["config"]["stage"][0]["steps"]) == (tmp_path, 6)

    def refuse(**_):
        raise OSError("No API key configured.")

    wandb.init = refuse
    with pytest.raises(TrainingError, match=r"Weights & Biases: No API key configured. WANDB_MODE=offline keeps"):
        MetricsLog(tmp_path, both, of.stage[0], 0, io.StringIO())
