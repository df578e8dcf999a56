"""An object in another process: its answers and errors, and its end, whoever brings it about."""

import os
import signal
import subprocess
import sys
from concurrent.futures import wait
from pathlib import Path

import pytest

from glm5.common.errors import ConfigError, GlmError, ProcessEnded
from glm5.common.remote import Remote
from glm5.common.watching import is_stopped
from tests.support.waiting import until

SECONDS = 60
TARGET = "tests.support.waiting:Remembering"


@pytest.fixture
def remote():
    made = Remote(TARGET, 3, name="the memory", watchdog_timeout=SECONDS)
    yield made
    made.close()


def test_answers_and_errors(remote):
    assert remote.call("add", 4).result(SECONDS) == 7
    big = "x" * 3_000_000  # more than pipes hold
    assert remote.call("echo", big).result(SECONDS) == big
    with pytest.raises(ConfigError, match=r"^no 5$"):
        remote.call("refuse", 5).result(SECONDS)
    with pytest.raises(GlmError, match="ZeroDivisionError: division by zero"):
        remote.call("divide").result(SECONDS)
    blocked = remote.call("wait_for_release")
    after = remote.call("add", 1)
    assert remote.call("release").result(SECONDS) is None, "concurrent calls do not wait for others"
    assert wait([blocked, after], SECONDS).not_done == set()
    assert after.result() == 8
    remote.close()
    with pytest.raises(ProcessEnded, match="the memory ended: it was closed"):
        remote.call("add", 1).result(SECONDS)
    assert remote.process.returncode == 0


def test_a_killed_process_fails_its_calls(remote):
    assert remote.ready.result(SECONDS) is None
    waiting = remote.call("wait_for_release")
    os.kill(remote.process.pid, signal.SIGKILL)
    with pytest.raises(ProcessEnded, match=r"the memory ended: its process was killed by SIGKILL"):
        waiting.result(SECONDS)


def test_a_stopped_process_is_killed():
    remote = Remote(TARGET, 3, name="the memory", watchdog_timeout=1)
    remote.ready.result(SECONDS)
    os.kill(remote.process.pid, signal.SIGSTOP)
    with pytest.raises(ProcessEnded, match=r"it was stopped, and has been killed"):
        remote.call("add", 1).result(SECONDS)
    assert not is_stopped(remote.process.pid)


def test_what_cannot_be_made_is_told():
    remote = Remote(TARGET, "three", name="the memory", watchdog_timeout=SECONDS)
    with pytest.raises(ConfigError, match=r"^got three$"):
        remote.ready.result(SECONDS)
    remote.close()


def test_it_ends_with_its_parent():
    code = f"""
import os
from glm5.common.remote import Remote
remote = Remote({TARGET!r}, 3, name="the memory", watchdog_timeout={SECONDS})
remote.ready.result({SECONDS})
print(remote.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    repo = Path(__file__).parents[3]
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo, timeout=SECONDS)
    pid = int(parent.stdout)
    until(lambda: not Path(f"/proc/{pid}").exists())
