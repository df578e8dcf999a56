"""Logging set-up and standard output."""

import logging

import pytest

from glm5.common import log
from glm5.common.console import out


@pytest.fixture
def _own_logging():
    logger = logging.getLogger("glm5")
    before = (logger.handlers[:], logger.level)
    yield
    logger.handlers[:], level = before
    logger.setLevel(level)


@pytest.mark.usefixtures("_own_logging")
def test_our_lines_go_to_standard_error_once(capsys):
    log.configure("debug")
    log.configure("info")
    logging.getLogger("glm5.x").info("ours %s", 1)
    logging.getLogger("glm5.x").debug("hidden")
    logging.getLogger("other").info("hidden")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(" ", 1)[1] for line in captured.err.splitlines()] == ["INFO glm5.x: ours 1"]


def test_out_writes_to_standard_output(capsys):
    out("a", end="")
    out("b", flush=True)
    assert capsys.readouterr().out == "ab\n"
