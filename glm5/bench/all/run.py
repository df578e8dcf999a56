"""Does the parts that are missing, as long as there is time, and records what is there."""

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
    """0 once every part is done, 3 while some are missing. Raises GlmError when a part failed, after the others; at
    once, ConfigError where results cannot be read, and UsageError where they cannot be written or no part is begun.

    `kernels`: the folder where processes that are started keep what they compile; emptied before steps.
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
    if missing and all(part.whole_seconds > settings.time_limit for part in missing):
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
    """What to say of parts that take longer than the limit of any run; "" where there are none."""
    seconds = {part.name: math.ceil(part.whole_seconds) for part in missing if part.whole_seconds > limit}
    if not seconds:
        return ""
    expected = ", ".join(f"{name} {number} s" for name, number in seconds.items())
    return f"expected to take longer than --time-limit {limit:g}: {expected}; give at least {max(seconds.values())}"


def _record(results: Path, every: list[BenchCommand], work: Work) -> None:
    """Write the entry, if there is anything to write: what others have measured stays until then."""
    if any(work.found(part) is not None for part in every):
        write(results, work.size.name, entry(every, work))


class _Clock:
    """Of a run that should end within `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self.limit, self.ends = limit, time.monotonic() + limit
        self.is_unused = True

    def allows(self, part: BenchCommand, seconds: float) -> bool:
        """Whether the part, which takes so many seconds from now, is expected to end in time. The first of a run has
        the whole limit, however long what came before took: else the same would be left again next time."""
        if self.is_unused:
            return part.whole_seconds <= self.limit
        return time.monotonic() + seconds <= self.ends


def _measure(missing: Sequence[BenchCommand], work: Work, clock: _Clock, record: Callable[[], None]) -> list[GlmError]:
    """Do the parts for which there is time; the errors of those that failed."""
    failed: list[GlmError] = []

    def measure(part: BenchCommand, address: Sequence[str] = (), beside: Process | None = None) -> None:
        clock.is_unused = False
        work.begin(part)
        try:
            with _noted(failed):
                _call([*part.command, *address, "--json", str(work.file(part))], clock.ends, beside)
        finally:
            record()

    for flags, group in groupby(missing, lambda part: part.server):
        some = list(group)
        if not flags:
            _each(some, clock, measure)
        elif any(clock.allows(part, part.whole_seconds) for part in some):
            address = ["--port", str(_free_port())]
            command = ["serve", str(_write_model(work)), *address, *flags]
            with _noted(failed), _served(command, int(address[1]), clock.ends) as process:
                _each(some, clock, partial(measure, address=address, beside=process))
            clock.is_unused = False
    return failed


def _write_model(work: Work) -> Path:
    size = work.size
    return write_weightless(preset(size.preset, size.layers), work.folder / "model", fp8=size.preset == "glm-5")


@contextmanager
def _noted(failed: list[GlmError]) -> Iterator[None]:
    """What fails is said and noted down."""
    try:
        yield
    except GlmError as error:
        out(f"error: {error}", flush=True)
        failed.append(error)


def _each(some: Sequence[BenchCommand], clock: _Clock, measure: Callable[[BenchCommand], None]) -> None:
    for part in some:
        if clock.allows(part, part.seconds):
            measure(part)


def _call(command: Sequence[str], ends: float, beside: Process | None = None) -> None:
    """Run a command of this package to its end. GlmError where it fails or takes too long, or where the server that it
    measures, `beside`, has ended."""
    process = _begin(command)
    try:
        while (code := _waited(process)) is None:
            if beside is not None and beside.poll() is not None:
                raise GlmError("glm5 serve has ended; what it says is above")
            if time.monotonic() > ends:
                raise GlmError(f"glm5 {command[0]} {command[1]} did not end in time; give --time-limit more")
    finally:
        _end(process)
    if code:
        raise GlmError(f"glm5 {command[0]} {command[1]} ended with code {code}; what it says is above")


@contextmanager
def _served(command: Sequence[str], port: int, ends: float) -> Iterator[Process]:
    """A server that is ready."""
    process = _begin(command)
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise GlmError("glm5 serve ended before it was ready; what it says is above")
            if time.monotonic() > ends:
                raise GlmError("glm5 serve was not ready in time; give --time-limit more")
            time.sleep(_POLL_SECONDS)
        yield process
    finally:
        _end(process)


def _begin(command: Sequence[str]) -> Process:
    """Start a command of this package. It ends with this process, however that ends: nothing holds a GPU that nobody
    waits for."""
    out("\n$ glm5 " + " ".join(command), flush=True)
    ends_too = partial(end_with_parent, os.getpid())
    return subprocess.Popen([sys.executable, "-m", "glm5", *command], preexec_fn=ends_too)


def _waited(process: Process) -> int | None:
    """Its exit code, if it has ended within a moment."""
    try:
        return process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _check_folder(flag: str, folder: Path) -> None:
    """Make it. UsageError where nothing can be written into it."""
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


def _end(process: Process) -> None:
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
    """Of the package, where git knows it."""
    home = Path(__file__).parents[3]
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(home), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None
