"""Boxes: what they do for programs, what they answer for what programs do wrong, and how their kind is chosen."""

import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from glm5.bench import boxes
from glm5.common.errors import ConfigError
from glm5.rl.sandbox import calls, choice
from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.choice import candidates, choose_backend, reason_against
from glm5.rl.sandbox.sandbox import Limits, Sandbox, SandboxFailed

UNSAFE = Backend("unsafe-local", sys.executable, is_same_python=True)


def backend_of(kind: str) -> Backend:
    """Skips the test, with the reason, where no box of this kind can be made."""
    if kind == "unsafe-local":
        return UNSAFE
    found = [backend for backend in candidates() if backend.kind == kind]
    reason = reason_against(found[0]) if found else "not installed"
    if reason:
        pytest.skip(f"{kind}: {reason}")
    return found[0]


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces", "unsafe-local"])
def backend(request) -> Backend:
    return backend_of(request.param)


@pytest.fixture
def box(backend):
    with Sandbox(backend, Limits(output_bytes=1000)) as box:
        yield box


def test_programs_run_and_leave_files(box):
    done = box.run("cat; echo wrong >&2; pwd > where; exit 3", stdin=b"given\n")
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"given\n", b"wrong\n")
    assert (done.ended_by, done.output_truncated) == ("exit", False)
    assert box.run(["cat", "where"]).stdout == box.read("where")
    box.write("new/folder/data", b"\0\1")
    assert box.run(["od", "-An", "-tx1", "new/folder/data"]).stdout.split() == [b"00", b"01"]
    assert box.run("kill -9 $$").exit_code == -signal.SIGKILL


def test_a_large_input_that_nobody_reads(box):
    assert box.run(["true"], stdin=b"x" * 1_000_000).exit_code == 0
    assert box.run(["wc", "-c"], stdin=b"x" * 1_000_000).stdout.strip() == b"1000000"


def test_what_cannot_run_is_a_result(box):
    assert box.run(["no-such-program"]).exit_code == 127
    assert box.run("no-such-program").exit_code == 127
    for argv in (["echo", "\0"], ["echo", "\ud800"], ["echo", "x" * 1_000_000], ["/"], [""]):
        done = box.run(argv)
        assert done.exit_code in (126, 127)
        assert done.stderr
    assert box.run(["echo", "fine"]).stdout == b"fine\n"


def test_time_and_output_are_bounded(box):
    done = box.run("trap '' TERM; while true; do echo xxxxxxxxxxxxxxxx; done", timeout=1)
    assert done.ended_by == "time-out"
    assert done.output_truncated
    assert len(done.stdout) == 1000
    assert done.exit_code == -signal.SIGKILL


def test_files_that_cannot_be_had(box):
    box.run("mkfifo pipe; mkdir folder; ln -s folder/loop folder/loop; ln -s / out; echo kept > file; ln -s file link")
    for path in ("none", "pipe", "folder", "folder/loop", "out/bin/sh", "/etc/passwd", "../x", "a\0b"):
        with pytest.raises(OSError, match=r".+: "):
            box.read(path)
    for path in ("pipe", "folder", "folder/loop", "out/new", "file/below", "link", "/tmp/x", "../x"):
        with pytest.raises(OSError, match=r".+: "):
            box.write(path, b"changed")
    assert box.read("link") == box.read("file") == b"kept\n"


def test_a_fresh_copy_has_the_files_and_nothing_else(box):
    box.run("mkdir -p a/b; echo 1 > a/b/c; chmod 750 a/b/c; chmod 555 a/b; ln -s a/b/c link; mkfifo pipe; sleep 60 &")
    show = "find . -type f -o -type l -o -type d | sort | xargs stat -c '%n %f'; cat link"
    with box.fresh_copy() as copy:
        assert copy.run(show).stdout == box.run(show).stdout
        assert copy.run(["sh", "-c", "test -e pipe"]).exit_code == 1
        copy.write("more", b"")
    with pytest.raises(OSError, match="No such file"):
        box.read("more")
    box.run("chmod -R u+w .")


def test_files_beyond_the_disk_are_no_fault(backend):
    with Sandbox(backend, Limits(disk_mb=1)) as box, pytest.raises(OSError, match="a box has 1 MB"):
        box.write("large", bytes(2_000_000))


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_box_that_ends_before_a_program_ran_is_a_fault(backend, is_ready):
    with Sandbox(backend) as box:
        if is_ready:
            box.wait()
        os.killpg(box._process.pid, signal.SIGKILL)
        with pytest.raises(SandboxFailed, match="does not answer" if is_ready else "could be started"):
            box.read("x")
        box.close()


def test_a_box_that_is_never_used(backend):
    Sandbox(backend).close()


def test_a_box_that_ends_after_one_is_a_result(backend):
    with Sandbox(backend) as box:
        box.run("echo x > file")
        os.killpg(box._process.pid, signal.SIGKILL)
        for _ in range(2):
            assert box.run(["true"]).ended_by == "broken"
            with pytest.raises(OSError, match="broke the box"):
                box.read("file")


HOST = """
import sys
sys.path.insert(0, sys.argv[1])
from glm5.rl.sandbox.backends import Backend
from glm5.rl.sandbox.sandbox import Sandbox
box = Sandbox(Backend(*eval(sys.argv[2])))
print("ready", flush=True)
box.run("echo $$ > pid; exec sleep " + sys.argv[3], timeout=600)
"""


def test_a_box_ends_with_its_host(backend):
    fields = (backend.kind, backend.python, backend.is_same_python, backend.bubblewrap)
    mark = f"{os.getpid()}.{len(backend.kind)}"  # seconds that no other test sleeps
    argv = [sys.executable, "-c", HOST, str(Path(__file__).parents[3]), repr(fields), mark]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        host.stdout.readline()
        deadline = time.monotonic() + 60
        while not (found := [pid for pid in os.listdir("/proc") if _argv(pid) == ["sleep", mark]]):
            assert host.poll() is None
            assert time.monotonic() < deadline
        ended = os.pidfd_open(int(found[0]))
        host.kill()
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)


def _argv(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


@pytest.fixture
def open_folder():
    """A folder that other users may read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no bwrap on the PATH"),
        ("echo bwrap: setting up uid map: Permission denied >&2; exit 1", "setting up uid map: Permission denied"),
        ('while [ "$1" != -- ]; do shift; done; shift; exec "$@"', "it does not isolate"),
    ],
)
def test_without_bubblewrap_it_is_namespaces_else_refused(text, reason, open_folder, monkeypatch):
    """The last of the programs runs what it is given, without a box."""
    backend_of("namespaces")
    if text is not None:
        (open_folder / "bwrap").write_text(f"#!/bin/sh\n{text}\n")
        (open_folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(open_folder))
    chosen = choose_backend()
    assert chosen.kind == "namespaces"
    assert "made by user namespaces, without network" in chosen.notice
    monkeypatch.setattr(choice, "candidates", lambda: [backend for backend in candidates() if backend.bubblewrap])
    with pytest.raises(ConfigError, match=rf"{reason}.*install bubblewrap.*--unsafe-local"):
        choose_backend()
    unsafe = choose_backend(unsafe_local=True)
    assert unsafe.kind == "unsafe-local"
    assert "UNPROTECTED" in unsafe.notice


REFUSED = """
import sys
from glm5.rl.sandbox.choice import choose_backend
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
try:
    choose_backend()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_where_the_kernel_allows_no_namespaces(tmp_path):
    backend_of("namespaces")
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    argv = [shutil.which("unshare") or pytest.skip("no unshare"), "-Ur", sys.executable, "-c", REFUSED]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert "ConfigError no sandbox works here (bubblewrap: there is no bwrap on the PATH; namespaces:" in done.stdout
    assert "unshare: No space left" in done.stdout


def filtered(program: bytes, architecture: int, number: int, argument: int) -> int:
    """What a filter answers to one system call, by BPF's rules."""
    data = struct.pack("=IIQQ", number, architecture, 0, argument)
    at = value = 0
    while True:
        code, yes, no, constant = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == calls.RETURN:
            return constant
        if code == calls.LOAD:
            value = struct.unpack_from("=I", data, constant)[0]
        else:
            holds = {calls.EQUAL: value == constant, calls.AT_LEAST: value >= constant, calls.ANY_BIT: value & constant}
            at += yes if holds[code] else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_system_calls(machine):
    program, mine = calls.call_filter(machine), calls.column(machine)
    architecture = calls.ARCHITECTURES[machine]
    refused = {numbers[mine] for numbers in calls.refused().values()}
    for number in range(500):
        answer = filtered(program, architecture, number, 0)
        assert (answer == calls.ALLOW) == (number not in refused), number
    for number, argument, allowed in (
        (calls.CLONE[mine], 0x11, True),
        (calls.CLONE[mine], 0x11 | calls.CLONE_NEWUSER, False),
        (calls.PRLIMIT[mine], 0, True),
        (calls.PRLIMIT[mine], 1, False),
        (calls.X32 + 1, 0, False),
    ):
        assert (filtered(program, architecture, number, argument) == calls.ALLOW) == allowed
    assert filtered(program, 0x40000003, 1, 0) == calls.KILL  # of i386
    with pytest.raises(ConfigError, match="x86_64 and aarch64 only, this is riscv64"):
        calls.call_filter("riscv64")


def test_the_benchmark(backend):
    assert "start median" in boxes.measure(backend, 2)
