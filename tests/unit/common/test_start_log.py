"""What is waited for is said before five seconds have passed in silence, whatever the clock says meanwhile."""

import logging
import threading
from itertools import pairwise

import pytest

from glm5.common import start_log
from glm5.common.start_log import LOOK_SECONDS, SILENT_SECONDS, Waits


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="glm5.common.start_log")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_line_comes_at_least_every_five_seconds(said):
    clock, times = Clock(), [100.0]
    wait = Waits("compiling kernels", clock)
    while clock.now < 131:
        clock.now += LOOK_SECONDS
        wait.at((clock.now - 100) / 100)
        wait.look()
        if len(said()) == len(times):
            times.append(clock.now)
    assert max(later - earlier for earlier, later in pairwise(times)) <= 5
    assert SILENT_SECONDS + LOOK_SECONDS < 5
    assert said()[:2] == [
        "start: still compiling kernels, 4 %, 4 s",
        "start: still compiling kernels, 8 %, 8 s",
    ]


def test_what_begins_is_said_from_its_own_beginning(said):
    clock = Clock()
    wait = Waits("starting the process", clock)
    clock.now += SILENT_SECONDS - 1
    wait.begin("loading weights")
    clock.now += 2
    wait.look()
    assert said() == []
    clock.now += SILENT_SECONDS
    wait.look()
    assert said() == ["start: still loading weights, 6 s"]


def test_what_is_shown_elsewhere_is_not_said_until_it_stands_still(said):
    clock = Clock()
    wait = Waits("loading weights", clock)
    for share in (0.1, 0.2, 0.3):
        clock.now += SILENT_SECONDS
        wait.at(share, is_shown=True)
        wait.look()
    assert said() == []
    clock.now += SILENT_SECONDS
    wait.look()
    assert said() == ["start: still loading weights, 30 %, 16 s"]


def test_a_thread_looks_within_the_block_and_ends_with_it(monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(start_log, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(Waits, "look", lambda _: looked.set())
    with Waits("importing torch") as wait:
        assert looked.wait(20)
    assert wait._over.is_set()
