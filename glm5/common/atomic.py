"""Files and folders that appear whole or not at all.

Written beside their target under a temporary name (so the final rename stays on one file system),
flushed to disk, then renamed. A failure or Ctrl-C leaves what was there before.
"""

import os
import re
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_BEGUN = re.compile(r"\..+\.[0-9a-f]{8}\.part")


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Generator[IO[Any], None, None]:
    """A file handle ("w" = UTF-8 text, "wb" = bytes) whose content replaces `path` when the block ends well."""
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_write: got mode {mode!r}, allowed: 'w' or 'wb'")
    target = Path(path)
    building = _beside(target, "part")
    try:
        with building.open(mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        building.replace(target)
    except BaseException:
        building.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_dir(path: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """An empty folder beside `path` that becomes `path` when the block ends well.

    A folder that is already there is replaced as a whole; the old one is deleted only after the new
    one is in place.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    building = _beside(target, "part")
    building.mkdir()
    try:
        yield building
        _swap(building, target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def sweep(folder: Path) -> None:
    """Delete what a process that was killed had begun to write in a folder. For who knows that nobody writes there."""
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
    target.replace(old)
    try:
        building.replace(target)
    except BaseException:
        old.replace(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.{ending}")
