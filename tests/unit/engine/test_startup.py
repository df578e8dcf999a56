"""Phases of a start: how long each took, and what is said while one lasts."""

import logging

import pytest

from glm5.engine.frontend.startup import BEGIN, WEIGHTS, Startup
from glm5.engine.transport.wire import Loading


def test_every_phase_has_its_seconds_and_its_line(caplog):
    caplog.set_level(logging.INFO, logger="glm5")
    now = [0.0]
    with Startup(clock=lambda: now[0]) as startup:
        for seconds, phase, share in [(2, WEIGHTS, 0), (9, WEIGHTS, 0.5), (9, WEIGHTS, 1), (1, "capturing prompts", 0)]:
            now[0] += seconds
            startup.receive(Loading(phase, share))
        now[0] += 6
        startup.waits.look()
        now[0] += 1
    assert startup.seconds == {BEGIN: 2, WEIGHTS: 19, "capturing prompts": 7}
    assert startup.ready_s == 7
    assert "start: still capturing prompts, 6 s" in caplog.messages
    assert caplog.messages[-1] == "start: capturing prompts took 7.0 s"
    assert str(startup) == f"{BEGIN} 2.0 s, {WEIGHTS} 19.0 s, capturing prompts 7.0 s"


def test_a_start_that_fails_says_nothing_more(caplog):
    caplog.set_level(logging.INFO, logger="glm5")
    with pytest.raises(ZeroDivisionError), Startup():
        _ = 1 / 0
    assert not caplog.messages
