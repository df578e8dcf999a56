"""A file is changed by one process at a time, whoever else wants to."""

import subprocess
import sys

import pytest

from glm5.common.exclusive import exclusive

NUM_PROCESSES, NUM_TURNS = 8, 5
COUNT = """
import sys
from pathlib import Path
from glm5.common.atomic import atomic_write
from glm5.common.exclusive import exclusive
path = Path(sys.argv[1])
sys.stdin.read()
for _ in range(int(sys.argv[2])):
    with exclusive(path):
        count = int(path.read_text())
        with atomic_write(path) as file:
            file.write(str(count + 1))
"""


def test_eight_processes_lose_no_turn(tmp_path):
    path = tmp_path / "count"
    path.write_text("0")
    command = [sys.executable, "-c", COUNT, str(path), str(NUM_TURNS)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(NUM_PROCESSES)]
    for process in processes:
        process.stdin.close()  # they begin together
    assert [process.wait() for process in processes] == [0] * NUM_PROCESSES
    assert int(path.read_text()) == NUM_PROCESSES * NUM_TURNS
    assert [entry.name for entry in tmp_path.iterdir()] == ["count"]


def test_a_lock_that_a_killed_process_left_holds_nobody_up(tmp_path):
    (tmp_path / ".keys.lock").write_text("")
    with exclusive(tmp_path / "keys"):
        pass
    assert not list(tmp_path.iterdir())


def test_the_lock_goes_with_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path / "keys"):
        _ = 1 / 0
    assert not list(tmp_path.iterdir())
