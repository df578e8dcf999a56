"""Processes that end with the one that started them; a signal is told at once, and a second one acts."""

import os
import signal
import subprocess
import sys

import pytest

from glm5.common.interrupt import noted_interrupt, orderly_end

CHILD = """
import os, sys, time
from glm5.common.interrupt import end_with_parent
end_with_parent(int(sys.argv[1]) if sys.argv[1:] else os.getppid())
print("waits", flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_process_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"waits\n"
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.stdout.read() == b"", "its end of the pipe is closed when it has ended"


def test_a_process_whose_parent_is_gone_already_ends_at_once():
    done = subprocess.run([sys.executable, "-c", CHILD, "1"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_signal_is_told_at_once_and_a_second_one_acts(capfd):
    with pytest.raises(KeyboardInterrupt), noted_interrupt("the step is finished first") as received:
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT]
        assert capfd.readouterr().err.strip() == "SIGINT: the step is finished first"
        signal.raise_signal(signal.SIGINT)


def test_a_request_to_end_unwinds_and_a_second_one_acts():
    undone = []
    with pytest.raises(SystemExit) as left, orderly_end():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            undone.append(signal.getsignal(signal.SIGTERM))
    assert (left.value.code, undone) == (143, [signal.SIG_DFL])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_who_listens_already_goes_on_listening():
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    try:
        with orderly_end():
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
