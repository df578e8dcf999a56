"""A bar on a terminal, plain lines in a log."""

import io

import pytest

from glm5.common import progress as module
from glm5.common.console import out, tell
from glm5.common.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unwritable(io.StringIO):
    num_failed = 0

    def write(self, _: str) -> int:
        self.num_failed += 1
        raise BrokenPipeError


def test_log_gets_plain_lines_with_rate_and_figures(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    log = io.StringIO()
    with Progress(total=4_000_000_000, unit="B", desc="load", stream=log) as progress:
        progress.update(1_000_000_000, shard=3, loss=0.123456)
        first = log.getvalue().removesuffix("\n")
    assert log.getvalue() == f"{first}\n", "what was told is not told again at the end"
    assert first.startswith("load: 1.00GB/4.00GB, ")
    assert "ETA" in first
    assert first.endswith("shard 3, loss 0.1235")
    assert "\r" not in log.getvalue()


def test_short_work_is_one_line():
    log = io.StringIO()
    with Progress(total=3, unit="step", desc="train", stream=log) as progress:
        for _ in range(3):
            progress.update(1)
    assert log.getvalue().startswith("train: 3/3 step, ")
    assert log.getvalue().count("\n") == 1


def test_a_log_that_cannot_be_written_ends_nothing(monkeypatch):
    log = Unwritable()
    with Progress(total=3, unit="step", desc="train", stream=log) as progress:
        progress.update(3)
    monkeypatch.setattr("sys.stdout", log)
    tell("listening")
    assert log.num_failed == 2
    with pytest.raises(BrokenPipeError):
        out("a result")


def test_unknown_total():
    log = io.StringIO()
    with Progress(total=None, unit="token", desc="chat", stream=log) as progress:
        progress.update(2)
    assert log.getvalue().startswith("chat: 2 token, ")


def test_terminal_gets_a_bar():
    terminal = Terminal()
    with Progress(total=10, unit="step", desc="train", stream=terminal) as progress:
        progress.update(10, loss=1.5)
    assert "\r" in terminal.getvalue()
    assert "10/10" in terminal.getvalue()
    assert "loss 1.5" in terminal.getvalue()


def test_a_terminal_of_unknown_width_gets_lines(monkeypatch):
    monkeypatch.setattr(module.os, "get_terminal_size", lambda number: module.os.terminal_size((0, 0)))
    terminal = Terminal()
    monkeypatch.setattr(terminal, "fileno", lambda: 2)
    with Progress(total=3, unit="step", desc="train", stream=terminal) as progress:
        progress.update(3)
    assert terminal.getvalue().startswith("train: 3/3 step, ")


def test_an_error_passes_through():
    log = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress(total=10, unit="step", desc="train", stream=log) as progress:
        progress.update(5)
        raise KeyboardInterrupt
    assert log.getvalue().startswith("train: 5/10 step")
