"""The folder in which child processes cache compiled kernels."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "TRITON_CACHE_DIR"


@contextmanager
def kernels_in(folder: str | Path) -> Iterator[None]:
    """Use `folder` for processes that are started in the block."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        if before is not None:
            os.environ[_VARIABLE] = before
