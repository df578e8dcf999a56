"""Logging set-up and standard output."""

import logging

import pytest

from glm5.common import log
from glm5.common.console import out


@pytest.fixture
def _own_logging():
    root, ours = logging.getLogger(), logging.getLogger("glm5")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.usefixtures("_own_logging")
def test_our_lines_go_to_standard_error_others_only_from_warning(capsys):
    log.configure("info")
    logging.getLogger("glm5.x").info("ours %s", 1)
    logging.getLogger("glm5.x").debug("hidden")
    logging.getLogger("other").info("hidden")
    logging.getLogger("other").warning("theirs")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(" ", 1)[1] for line in captured.err.splitlines()] == [
        "INFO glm5.x: ours 1",
        "WARNING other: theirs",
    ]


def test_out_writes_to_standard_output(capsys):
    out("a", end="")
    out("b", flush=True)
    assert capsys.readouterr().out == "ab\n"
