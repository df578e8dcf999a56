"""A process on another machine, here another address of this one: pipes, exit codes, ends on both sides, sockets."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from glm5.common.elsewhere import LOST, Host
from glm5.common.remote import Remote
from tests.support.waiting import until

REPO, SECONDS = Path(__file__).parents[3], 60


@pytest.fixture
def launch(tmp_path):
    """Commands in place of Python, each for one process; `key`: another than the host's."""
    threads = []

    def make(key=None):
        own = os.urandom(32)
        host = Host("127.0.0.1", own)
        threads.append(threading.Thread(target=host.serve, daemon=True))
        threads[-1].start()
        file = tmp_path / str(len(threads))
        address, port = host.address
        file.write_text(json.dumps({"host": address, "port": port, "key": (key or own).hex()}))
        return [sys.executable, "-m", "glm5.common.elsewhere", str(file)]

    yield make
    for one in threads:
        one.join(SECONDS)
        assert not one.is_alive(), "a host goes on"


def start(launch, code: str, *more: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen([*launch, *more, "-c", code], cwd=REPO, stdin=pipe, stdout=pipe, stderr=pipe)


def test_pipes_and_exit_codes(launch):
    code = "import sys; print(sys.stdin.read()[::-1]); print('told', file=sys.stderr); sys.exit(7)"
    process = start(launch(), code)
    out, err = process.communicate(b"abc" * 100_000, SECONDS)
    assert (out.strip(), err, process.returncode) == (b"cba" * 100_000, b"told\n", 7)
    other = start(launch(), "import sys; print(sys.executable)", "--python", sys.executable)
    assert other.communicate(timeout=SECONDS)[0].strip() == sys.executable.encode()


def test_a_killed_process_and_a_killed_stand_in(launch):
    code = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    process = start(launch(), code)
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL
    process = start(launch(), code)
    pid = int(process.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=SECONDS)
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_only_who_has_the_key_is_served(launch, tmp_path):
    right = launch()
    wrong = json.loads((tmp_path / "1").read_text())
    (tmp_path / "wrong").write_text(json.dumps(wrong | {"key": "00" * 32}))
    refused = start([*right[:-1], str(tmp_path / "wrong")], "print('ran')")
    out, _ = refused.communicate(timeout=SECONDS)
    assert refused.returncode in (1, LOST)
    assert b"ran" not in out
    assert start(right, "print('ran')").communicate(timeout=SECONDS)[0] == b"ran\n"


def test_an_object_elsewhere(launch):
    remote = Remote("tests.support.waiting:Remembering", 3, name="it", watchdog_timeout=SECONDS, launch=launch())
    assert remote.call("add", 4).result(SECONDS) == 7
    remote.close()
    assert remote.process.returncode == 0
