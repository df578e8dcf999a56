"""Native code, compiled for this machine on first use and cached. Compilation takes a second or two.

It is compiled for the processor's instructions, except those that ATEN_CPU_CAPABILITY disables in torch.
The cache key is a digest of the sources, the flags, the compiler and the processor, so a stale file is never loaded.
Without a C++ compiler on the PATH (c++, g++ or clang++), torch implementations are used. A source is one .cpp with the
headers in its folder; the folder names the cached file. Later processes delete what a killed one has left.
"""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# No -ffast-math: it would lose NaN, and set the whole process to flush small numbers to zero. No contraction of
# products and sums: GCC 13, tuned for Sapphire Rapids, chooses it loop by loop, so that rows are not alone.
_FLAGS = (
    *("-std=gnu++17", "-O3", "-march=native", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
# By what torch uses, on x86. What builds on the named instructions is left out with them.
_LEFT_OUT = {"DEFAULT": "-mno-avx", "AVX2": "-mno-avx512f"}
_TIMEOUT_S = 120
_BEGUN = "begun-"  # folders in which something is compiled


@cache
def library(source: Path, without: str) -> ctypes.CDLL | None:
    """The compiled code, or None; the reason and the consequence `without` it are logged."""
    compiler, what = find_compiler(), source.parent.name
    if compiler is None:
        logger.info("no C++ compiler (c++, g++ or clang++) on the PATH, so no native code: %s", without)
        return None
    try:
        return _loaded(compiler, source, f"{what}-{_digest(compiler, source)}.so")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        logger.warning("%s could not be compiled with %s: %s: %s", what, compiler, without, said[-2000:])
        return None


def identity(source: Path, without: str) -> str | None:
    """A key of this machine's native code, which differs for code with other rounding; None without native code."""
    compiler = find_compiler()
    return _digest(compiler, source) if compiler is not None and library(source, without) is not None else None


def find_compiler() -> str | None:
    """Path of a C++ compiler."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def processor() -> str:
    """The processor's features for -march=native. On another kind, sums may have another order."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    return " ".join(sorted({line for line in lines if line.startswith(wanted)}))


def _loaded(compiler: str, source: Path, name: str) -> ctypes.CDLL:
    """Compiled to `name` in the user's cache; without a usable home, to a temporary file of this process."""
    kept: Path | None = None
    try:
        folder = Path.home() / ".cache" / "glm5"
        _sweep(folder)
        if (folder / name).is_file() and (found := _opened(folder / name)) is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        building = tempfile.TemporaryDirectory(prefix=_BEGUN, dir=folder)
        kept = folder / name
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        logger.warning("%s is compiled at every start, as nothing can be kept: %s", name, error)
        building = tempfile.TemporaryDirectory()
    # Under another name first: others may be at it, and half a file must never be loaded.
    with building:
        made = Path(building.name) / name
        command = [compiler, *_flags(), str(source), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        found = ctypes.CDLL(str(made))
        if kept is not None:
            made.replace(kept)
    return found


def _flags() -> tuple[str, ...]:
    left_out = _LEFT_OUT.get(torch.backends.cpu.get_cpu_capability())
    return (*_FLAGS, left_out) if left_out and platform.machine() in ("x86_64", "AMD64") else _FLAGS


def _opened(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        logger.warning("%s is damaged; it is compiled again", path)
        return None


def _sweep(folder: Path) -> None:
    """Delete unfinished compilations that are too old to be still running."""
    for begun in folder.glob(f"{_BEGUN}*"):
        with suppress(OSError):  # other processes delete them, too
            if time.time() - begun.stat().st_mtime > 2 * _TIMEOUT_S:
                shutil.rmtree(begun, ignore_errors=True)


def _digest(compiler: str, source: Path) -> str:
    digest = blake2b(digest_size=12, person=b"glm5 cpu_layer")
    for path in sorted([*source.parent.glob("*.h"), source]):
        digest.update(path.read_bytes())
    stat = os.stat(compiler)
    digest.update(f"{_flags()} {os.path.realpath(compiler)} {stat.st_size} {stat.st_mtime_ns} {processor()}".encode())
    return digest.hexdigest()
