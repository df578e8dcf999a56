"""Logging set-up and standard output."""

import io
import json
import logging
import sys

from glm5.common import log
from glm5.common.console import out


def test_our_lines_go_to_standard_error_once(capsys):
    log.configure("debug")
    log.configure("info")
    logging.getLogger("glm5.x").info("ours %s", 1)
    logging.getLogger("glm5.x").debug("hidden")
    logging.getLogger("other").info("hidden")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(" ", 1)[1] for line in captured.err.splitlines()] == ["INFO glm5.x: ours 1"]


def test_lines_name_the_request_that_caused_them(capsys):
    log.configure()
    token = log.REQUEST_ID.set("abc")
    logging.getLogger("glm5.x").info("within")
    log.REQUEST_ID.reset(token)
    logging.getLogger("glm5.x").info("after")
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["INFO glm5.x: within [abc]", "INFO glm5.x: after"]


def test_lines_as_json(capsys):
    log.configure(style="json")
    assert log.style() == "json"
    token = log.REQUEST_ID.set("abc")
    logging.getLogger("glm5.x").info("two\nlines", extra={"seconds": 0.5})
    log.REQUEST_ID.reset(token)
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        logging.getLogger("uvicorn.error").exception("a bug")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO",
        "logger": "glm5.x",
        "message": "two\nlines",
        "request_id": "abc",
        "seconds": 0.5,
    }
    assert "ZeroDivisionError" in second["exception"]
    assert "request_id" not in second


def test_lines_go_where_standard_error_goes_now(capsys, monkeypatch):
    log.configure()
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr", other)
    logging.getLogger("glm5.x").info("a line")
    assert other.getvalue().endswith("INFO glm5.x: a line\n")
    assert capsys.readouterr().err == ""


def test_out_writes_to_standard_output(capsys):
    out("a", end="")
    out("b", flush=True)
    assert capsys.readouterr().out == "ab\n"
