"""Where processes that a command starts keep compiled kernels."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "TRITON_CACHE_DIR"


@contextmanager
def kernels_in(folder: str | Path) -> Iterator[None]:
    """In `folder`, for processes that are started meanwhile."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        if before is not None:
            os.environ[_VARIABLE] = before
