"""A box: run a program, read and write files, copy it afresh for grading, close it.

What a program does is a result: its exit code, its time-out, its memory. Only a fault of the box itself raises
SandboxFailed, which an environment turns into EpisodeFailed("sandbox", ...). A box that no longer answers once a
program ran in it was broken by that program, as far as anyone can tell: that too is a result, or crashing would pay.
"""

import errno
import marshal
import os
import platform
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, Self

from glm5.rl.sandbox.backends import WORK, Backend
from glm5.rl.sandbox.calls import call_filter
from glm5.rl.sandbox.server import Answer

Ending = Literal["exit", "time-out", "memory", "processes", "files", "broken"]
ENDINGS: tuple[Ending, ...] = ("exit", "time-out", "memory", "processes", "files")  # as server.py counts them
PATIENCE = 30.0  # seconds for a box to start, or to answer beyond a program's own time, on an overloaded machine
MB = 1_000_000


class SandboxFailed(Exception):
    """A box could not be made, or failed before any program ran in it."""


@dataclass(frozen=True)
class Limits:
    """What a box may use, all its programs together. `open_files` is for each process, `output_bytes` for each of
    standard output and error; beyond it, output is dropped. `files`: files, folders and links in the box."""

    memory_mb: int = 512
    disk_mb: int = 128
    processes: int = 64
    files: int = 10_000
    open_files: int = 256
    output_bytes: int = 64_000


@dataclass(frozen=True)
class Completed:
    """How a program ended. `exit_code`: -N for signal N, as where a limit ended it. `ended_by`: "exit" for the program
    itself, else the limit that it exceeded, or "broken" where the box stopped answering. `seconds`: of wall time."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    ended_by: Ending = "exit"
    output_truncated: bool = False
    seconds: float = 0.0


class Sandbox:
    """One box, with a folder of its own in which programs start. For one episode and one thread. Close it."""

    def __init__(self, backend: Backend, limits: Limits = Limits()) -> None:
        """Begin to start a box: it gets ready while the policy thinks. Raises SandboxFailed, here or at its first use;
        ConfigError on a processor of another kind (calls.py)."""
        self.backend, self.limits = backend, limits
        self._state: Literal["starting", "new", "used", "broken", "closed"] = "starting"
        is_contained = backend.kind != "unsafe-local"
        self._local = None if is_contained else tempfile.TemporaryDirectory()
        folder = WORK if self._local is None else os.path.realpath(self._local.name)
        settings = {
            "is_contained": is_contained,
            "folder": folder,
            "env": backend.environment(folder),
            "filter": call_filter(platform.machine()) if is_contained else b"",
            "memory_bytes": limits.memory_mb * MB,
            "disk_bytes": limits.disk_mb * MB,
            **asdict(limits),
        }
        self._deadline = time.monotonic() + PATIENCE
        self._link, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  what the first process says where it fails
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                self._process = backend.start(theirs.fileno(), self._errors, limits.disk_mb * MB)
            self._send(backend.code(), self._deadline)
            if backend.kind == "namespaces":
                self._send(backend.jail(limits.disk_mb * MB), self._deadline)
            self._send(settings, self._deadline)
        except OSError as error:
            raise self._failed_to_start(error) from error

    def wait(self) -> None:
        """Until it is ready. Every use does this first. Raises SandboxFailed."""
        if self._state == "starting":
            try:
                self._answer(self._deadline)
            except OSError as error:
                raise self._failed_to_start(error) from error
            self._state = "new"

    def _failed_to_start(self, error: OSError) -> SandboxFailed:
        self._end()
        self._errors.seek(0)
        said = self._errors.read(5_000).decode(errors="replace").strip().rpartition("\n")[2]
        self.close()
        return SandboxFailed(f"no box of {self.backend.kind} could be started: {said or error}")

    def run(self, command: str | Sequence[str], timeout: float = 10.0, stdin: bytes = b"") -> Completed:
        """Run a program (words), or a line of shell, to its end or for `timeout` seconds. Nothing that it started is
        left afterwards; files are. What stops it is in the result. Raises SandboxFailed."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        self.wait()
        begun = time.monotonic()
        if self._state == "new":
            self._state = "used"
        try:
            answer = self._ask(timeout, "run", argv, stdin, timeout)
        except _Broken:
            return Completed(-signal.SIGKILL, b"", b"", "broken", seconds=time.monotonic() - begun)
        error, exit_code, ending, cut, out, err = answer
        if error:
            raise SandboxFailed(f"a program could not be started: {out.decode(errors='replace')}")
        return Completed(exit_code, out, err, ENDINGS[ending], bool(cut), time.monotonic() - begun)

    def read(self, path: str) -> bytes:
        """A file's content; `path` is relative to the box's folder. Raises OSError for what programs can bring about
        (no such file, no regular file, a link that leads out, a broken box), SandboxFailed."""
        return self._done("read", path, _checked(path))

    def write(self, path: str, data: bytes) -> None:
        """Write a file, and the folders above it. Raises OSError (no room, a folder in the way ...), SandboxFailed."""
        if len(data) > self.limits.disk_mb * MB:
            raise OSError(errno.EFBIG, f"{path}: {len(data)} bytes, a box has {self.limits.disk_mb} MB")
        self._done("write", path, _checked(path), data)

    def fresh_copy(self) -> "Sandbox":
        """A new box with the same files in its folder, where nothing else is left of what programs did: for grading.
        Raises OSError for what programs can bring about (files too long or unreadable), SandboxFailed."""
        packed = self._done("pack", "the folder")
        copy = Sandbox(self.backend, self.limits)
        try:
            copy._done("unpack", "the folder", packed)
        except BaseException:
            copy.close()
            raise
        return copy

    def close(self) -> None:
        """End every process of the box and forget its files. It may be called twice."""
        if self._state != "closed":
            self._state = "closed"
            self._end()
            self._errors.close()
            if self._local is not None:
                self._local.cleanup()

    def _end(self) -> None:
        self._link.close()  # the first process then ends, and with it all others
        if self._process is not None:
            try:
                self._process.wait(1)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _done(self, name: str, path: str, *arguments: Any) -> bytes:
        try:
            code, *_, found, _ = self._ask(0, name, *arguments)
        except _Broken as error:
            raise OSError(errno.EIO, f"{path}: a program broke the box") from error
        if code:
            raise OSError(code, f"{path}: {found.decode(errors='replace')}")
        return found

    def _ask(self, seconds: float, *request: Any) -> Answer:
        """Raises _Broken where a program ran before and the box does not answer, SandboxFailed where none did."""
        assert self._process is not None
        assert self._state != "closed"
        self.wait()
        if self._state == "broken":
            raise _Broken
        deadline = time.monotonic() + seconds + PATIENCE
        try:
            self._send(request, deadline)
            return self._answer(deadline)
        except OSError as error:
            was_new, self._state = self._state == "new", "broken"
            os.killpg(self._process.pid, signal.SIGKILL)
            if was_new:
                raise SandboxFailed(f"a box of {self.backend.kind} does not answer: {error}") from error
            raise _Broken from error

    def _send(self, request: Any, deadline: float) -> None:
        data = marshal.dumps(request, 2)
        self._link.settimeout(max(0.001, deadline - time.monotonic()))
        self._link.sendall(len(data).to_bytes(8, "little"))
        self._link.sendall(data)

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._link.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._link.recv(min(size - len(data), MB))
            if not piece:
                raise ConnectionError("it ended")
            data += piece
        return bytes(data)

    def _answer(self, deadline: float) -> Answer:
        head = self._receive(24, deadline)
        error, exit_code, ending, cut, first, second = struct.unpack("<6i", head)
        if not 0 <= first + second <= 2 * (self.limits.disk_mb * MB + self.limits.output_bytes) + MB:
            raise ConnectionError(f"an answer of {first + second} bytes")
        return error, exit_code, ending, cut, self._receive(first, deadline), self._receive(second, deadline)


class _Broken(Exception):
    """A box that a program ran in does not answer."""


def _checked(path: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
        raise OSError(errno.EINVAL, f"{path!r}: paths are relative to the box's folder, without '..'")
    return path
