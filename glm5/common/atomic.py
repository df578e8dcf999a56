"""Atomic writes: files and folders appear complete or not at all.

Written beside their target under a temporary name (so the final rename stays on one file system),
flushed to disk, then renamed. After a failure, Ctrl-C or SIGTERM the old content is still there. The next write to a
folder deletes what a killed process has left of it.

A link stays: the file that it leads to is replaced. What is no regular file, such as a pipe or a device, is written to.
"""

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # a write says only so, not where
_BEGUN = re.compile(r"\..+\.[0-9a-f]{8}\.(part|old)")


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Generator[IO[Any], None, None]:
    """A file handle ("w" = UTF-8 text, "wb" = bytes) whose content replaces `path` when the block succeeds."""
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_write: got mode {mode!r}, allowed: 'w' or 'wb'")
    encoding = None if "b" in mode else "utf-8"
    target = _followed(Path(path))
    if isinstance(target, int):
        with os.fdopen(target, mode, encoding=encoding) as handle:
            yield handle
        return
    building = _beside(target, "part")
    try:
        with building.open(mode.replace("w", "x"), encoding=encoding) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        building.replace(target)
    except BaseException as error:
        building.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            error.filename = str(path)
        raise


def atomic_write_json(path: str | os.PathLike[str], document: Any) -> None:
    """Replace `path` by `document` as indented JSON."""
    with atomic_write(path, "wb") as handle:
        handle.write(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


@contextmanager
def atomic_dir(path: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """An empty temporary folder that replaces `path` when the block ends without error.

    An existing folder is deleted only after the new one is in place.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(target)
    building = _beside(target, "part")
    try:
        building.mkdir()
        with _held(building):
            yield building
            _swap(building, target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def clear_leftovers(target: Path) -> list[Path]:
    """Delete what killed processes have left of `target`, or restore it if one was killed between the two renames.
    Returns folders that other processes may be writing: without file locks nothing is deleted."""
    own = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(old|part)")
    theirs: list[Path] = []
    for path in sorted(target.parent.glob(".*"), key=lambda path: path.suffix):  # old ones first
        if not own.fullmatch(path.name) or not path.is_dir():
            continue
        with suppress(FileNotFoundError), _held(path) as is_held:  # its process may have just finished
            if not is_held:
                theirs.append(path)
            elif path.suffix == ".old" and not target.exists():
                path.replace(target)
            else:
                shutil.rmtree(path, ignore_errors=True)
    return theirs


@contextmanager
def _held(folder: Path) -> Generator[bool, None, None]:
    """Lock a folder, even if it is renamed. Yields False if another process holds it or locks are not supported."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(held)


def sweep(folder: Path) -> None:
    """Delete unfinished writes of killed processes in a folder. Only safe while no process writes there."""
    for path in folder.glob(".*"):
        if _BEGUN.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _swap(building: Path, target: Path) -> None:
    if not target.exists():
        building.replace(target)
        return
    old = _beside(target, "old")
    with _held(target):
        target.replace(old)
        try:
            building.replace(target)
        except BaseException:
            old.replace(target)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _followed(path: Path) -> Path | int:
    """The file that a path leads to, which need not exist; or a descriptor to write to, if it is no regular file or is
    one that this process has open (`/dev/stdout`, `/dev/fd/3`). Raises OSError."""
    with suppress(FileNotFoundError):
        path.stat()  # raises for links in a circle
    while not _is_descriptor(path):
        if not path.is_symlink():
            is_file = path.is_file() or path.is_dir() or not path.exists()
            return path if is_file else os.open(path, os.O_WRONLY)
        path = path.parent / path.readlink()
    return os.dup(int(path.name))  # not opened anew, which would begin a file again and cannot open a socket


def _is_descriptor(path: Path) -> bool:
    return path.name.isdecimal() and os.path.realpath(path.parent) in (f"/proc/{os.getpid()}/fd", "/dev/fd")


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.{ending}")
