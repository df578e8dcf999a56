"""One process at a time, for a file that is read, changed and written again: of two at once, one would be lost."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold `path`, which need not exist, among all who ask for it so; waits for whoever holds it. Raises OSError.

    A file beside it is locked, since `atomic_write` replaces the file itself. The lock's file is gone when nobody holds
    it; a process that was killed leaves it without harm.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_still(lock, handle.fileno()):  # whoever held it has deleted it: others lock another file by now
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
