"""Does the parts that are missing, as long as there is time, and records what is there."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from glm5.bench.all.parts import START_SECONDS, Part, Size, parts, read, server, size_of
from glm5.bench.all.record import entry, table, write
from glm5.checkpoint.init import write_weightless
from glm5.common.console import out
from glm5.common.errors import ConfigError, GlmError
from glm5.common.interrupt import end_with_parent
from glm5.config.bench_all import BenchAllConfig
from glm5.config.presets import preset
from glm5.kernels.triton_support import installed

Process = subprocess.Popen[bytes]

_LEAVE_SECONDS = 60.0
_POLL_SECONDS = 0.5


def run(settings: BenchAllConfig, kernels: Path) -> int:
    """0 once every part is done, 3 while some are missing. Raises GlmError when a part failed, after the others, and
    ConfigError at once where results cannot be written.

    `kernels`: the folder where processes that are started keep what they compile; emptied before steps.
    """
    ends = time.monotonic() + settings.time_limit
    gpus = torch.cuda.device_count()
    size = size_of(settings, settings.tensor_parallel_size or gpus or 1)
    work = Path(settings.work).absolute() / size.name
    results = Path(settings.json_)
    _check_folder("--work", work)
    _check_folder("--json", results.parent)
    if results.exists():
        read(results)
    model, port = work / "model", _free_port()
    every = parts(settings, size, kernels=gpus > 0 and installed(), port=port)
    out(f"{size.name}: {settings.preset}, {size.layers} layers on {size.gpus}; results in {work}", flush=True)
    commit = settings.commit or _commit()
    failed: list[GlmError] = []

    def measure(part: Part, beside: Process | None = None) -> None:
        try:
            with _noted(failed):
                _call([*part.command, "--json", str(part.file(work))], ends, beside)
        finally:
            if part.file(work).exists():
                write(results, size.name, entry(size, every, work, commit))

    missing = [part for part in every if not part.is_done(work)]
    if not every[0].is_done(work):
        shutil.rmtree(kernels, ignore_errors=True)
    for serves, group in groupby(missing, lambda part: part.clients is not None):
        some = list(group)
        if not serves:
            _each(some, ends, measure)
        elif any(_fits(part, ends, START_SECONDS) for part in some):
            _write_model(settings, size, model)
            with _noted(failed), _served(server(settings, size, model, port), port, ends) as process:
                _each(some, ends, partial(measure, beside=process))
    if failed:
        raise failed[0]
    found = entry(size, every, work, commit)
    out("\n" + table(found))
    if found["missing"]:
        out(f"not done yet: {', '.join(found['missing'])}; the same command goes on")
    return 3 if found["missing"] else 0


def _fits(part: Part, ends: float, more: float = 0.0) -> bool:
    return time.monotonic() + part.seconds + more < ends


def _write_model(settings: BenchAllConfig, size: Size, model: Path) -> None:
    cfg = preset(settings.preset, size.layers)
    write_weightless(cfg, model, fp8=settings.preset == "glm-5")


@contextmanager
def _noted(failed: list[GlmError]) -> Iterator[None]:
    """What fails is said and noted down."""
    try:
        yield
    except GlmError as error:
        out(f"error: {error}", flush=True)
        failed.append(error)


def _each(some: Sequence[Part], ends: float, measure: Callable[[Part], None]) -> None:
    for part in some:
        if _fits(part, ends):
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
    """Make it. ConfigError where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write to {folder}: {error.strerror}; name another place") from None


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
