"""Runs the missing parts while there is time, and records their results."""

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from glm5.bench.all.commands import BenchCommand, parts, read, size_of
from glm5.bench.all.record import entry, table, write
from glm5.bench.all.work import Work
from glm5.checkpoint.init import write_weightless
from glm5.common.console import out
from glm5.common.errors import GlmError, UsageError
from glm5.common.interrupt import end_with_parent
from glm5.common.writable import try_to_write
from glm5.config.bench_all import BenchAllConfig
from glm5.config.presets import preset
from glm5.kernels.triton_support import installed

Process = subprocess.Popen[bytes]

_LEAVE_SECONDS = 60.0
_POLL_SECONDS = 0.5


def run(settings: BenchAllConfig, kernels: Path) -> int:
    """Exit code 0 if every part is done, 3 if some are missing. `kernels`: the folder of compiled kernels of the
    started processes, emptied before `steps`.

    Raises ConfigError if results cannot be read, UsageError if they cannot be written or no part fits the time limit,
    and GlmError after the other parts if one failed.
    """
    gpus = torch.cuda.device_count()
    size = size_of(settings, gpus)
    work = Work(Path(settings.work).absolute() / size.name, size, settings.commit or _commit())
    results = Path(settings.json_)
    _check_folder("--work", work.folder)
    _check_folder("--json", results.parent)
    if results.exists():
        read(results)
    every = parts(settings, size, kernels=gpus > 0 and installed())
    missing = [part for part in every if not work.is_done(part)]
    if missing and all(part.total_seconds > settings.time_limit for part in missing):
        raise UsageError(f"nothing could be begun; {_need(missing, settings.time_limit)}")
    out(f"{size.name}: {settings.preset}, {size.layers} layers on {size.gpus}; results in {work.folder}", flush=True)
    _record(results, every, work)
    if every[0] in missing:
        shutil.rmtree(kernels, ignore_errors=True)
    if failed := _measure(missing, work, _Clock(settings.time_limit), lambda: _record(results, every, work)):
        raise failed[0]
    out("\n" + table(entry(every, work)))
    if left := [part for part in missing if not work.is_done(part)]:
        need = _need(left, settings.time_limit)
        names = ", ".join(part.name for part in left)
        out(f"not done yet: {names}; {need and f'{need}, and '}the same command goes on")
    return 3 if left else 0


def _need(missing: Sequence[BenchCommand], limit: float) -> str:
    """The message about parts that are expected to exceed the time limit of a run; "" without any."""
    seconds = {part.name: math.ceil(part.total_seconds) for part in missing if part.total_seconds > limit}
    if not seconds:
        return ""
    expected = ", ".join(f"{name} {number} s" for name, number in seconds.items())
    return f"expected to take longer than --time-limit {limit:g}: {expected}; give at least {max(seconds.values())}"


def _record(results: Path, every: list[BenchCommand], work: Work) -> None:
    """Write the entry if any part has results. Until then an existing entry is kept."""
    if any(work.found(part) is not None for part in every):
        write(results, work.size.name, entry(every, work))


class _Clock:
    """The time that is left of a run of `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self.limit, self.ends = limit, time.monotonic() + limit
        self.is_unused = True

    def allows(self, part: BenchCommand, seconds: float) -> bool:
        """Whether the part is expected to end in time if it takes `seconds` from now. The first part of a run gets the
        full limit, whatever the setup took: otherwise it would be skipped again in the next run."""
        if self.is_unused:
            return part.total_seconds <= self.limit
        return time.monotonic() + seconds <= self.ends


def _measure(missing: Sequence[BenchCommand], work: Work, clock: _Clock, record: Callable[[], None]) -> list[GlmError]:
    """Run the parts for which there is time; returns the errors of those that failed."""
    failed: list[GlmError] = []

    def measure(part: BenchCommand, address: Sequence[str] = (), server: Process | None = None) -> None:
        clock.is_unused = False
        work.begin(part)
        try:
            with _collect_errors(failed):
                _call([*part.command, *address, "--json", str(work.file(part))], clock.ends, server)
        finally:
            record()

    for flags, group in groupby(missing, lambda part: part.server):
        some = list(group)
        if not flags:
            _run_in_time(some, clock, measure)
        elif any(clock.allows(part, part.total_seconds) for part in some):
            address = ["--port", str(_free_port())]
            command = ["serve", str(_write_model(work)), *address, *flags]
            with _collect_errors(failed), _running_server(command, int(address[1]), clock.ends) as process:
                _run_in_time(some, clock, partial(measure, address=address, server=process))
            clock.is_unused = False
    return failed


def _write_model(work: Work) -> Path:
    size = work.size
    return write_weightless(preset(size.preset, size.layers), work.folder / "model", fp8=size.preset == "glm-5")


@contextmanager
def _collect_errors(failed: list[GlmError]) -> Iterator[None]:
    """Errors are printed and appended to `failed`."""
    try:
        yield
    except GlmError as error:
        out(f"error: {error}", flush=True)
        failed.append(error)


def _run_in_time(parts: Sequence[BenchCommand], clock: _Clock, measure: Callable[[BenchCommand], None]) -> None:
    for part in parts:
        if clock.allows(part, part.seconds):
            measure(part)


def _call(command: Sequence[str], ends: float, server: Process | None = None) -> None:
    """Run a command of this package. Raises GlmError if it fails or takes too long, or if `server`, which it measures,
    has ended."""
    process = _start(command)
    try:
        while (code := _exit_code(process)) is None:
            if server is not None and server.poll() is not None:
                raise GlmError("glm5 serve has ended; what it says is above")
            if time.monotonic() > ends:
                raise GlmError(f"glm5 {command[0]} {command[1]} did not end in time; give --time-limit more")
    finally:
        _stop(process)
    if code:
        raise GlmError(f"glm5 {command[0]} {command[1]} ended with code {code}; what it says is above")


@contextmanager
def _running_server(command: Sequence[str], port: int, ends: float) -> Iterator[Process]:
    """Start a server and wait until it is ready."""
    process = _start(command)
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise GlmError("glm5 serve ended before it was ready; what it says is above")
            if time.monotonic() > ends:
                raise GlmError("glm5 serve was not ready in time; give --time-limit more")
            time.sleep(_POLL_SECONDS)
        yield process
    finally:
        _stop(process)


def _start(command: Sequence[str]) -> Process:
    """Start a command of this package. It is killed when this process ends in any way, so that no orphan keeps a
    GPU."""
    out("\n$ glm5 " + " ".join(command), flush=True)
    preexec_fn = partial(end_with_parent, os.getpid())
    return subprocess.Popen([sys.executable, "-m", "glm5", *command], preexec_fn=preexec_fn)


def _exit_code(process: Process) -> int | None:
    """Its exit code; None if it is still running after `_POLL_SECONDS`."""
    try:
        return process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _check_folder(flag: str, folder: Path) -> None:
    """Create it. Raises UsageError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try_to_write(folder)
    except OSError as error:
        raise UsageError(f"{flag}: cannot write to {folder}: {error.strerror}; name another place") from None


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=_POLL_SECONDS) as answer:
            return answer.status == 200
    except OSError:  # not yet
        return False


def _stop(process: Process) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _commit() -> str | None:
    """The package's git commit; None without a repository."""
    home = Path(__file__).parents[3]
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(home), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None
