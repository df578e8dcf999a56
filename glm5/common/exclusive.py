"""A lock between processes for changing a file, so that no concurrent change is lost."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Lock `path`, which need not exist; waits until other processes release it. Raises OSError.

    The lock is a separate file, because `atomic_write` replaces the file itself. It is deleted on release; one left by
    a killed process has no effect.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_still(lock, handle.fileno()):  # the last holder deleted it, so others lock a new file
                continue
            try:
                yield
            finally:
                lock.unlink()
            return


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
