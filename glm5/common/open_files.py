"""The limit on open files of this process, which includes sockets and pipes."""

import os
import resource
import sys
from contextlib import suppress


def allow_many() -> None:
    """Raise this process's soft limit to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """The maximum number of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """The number of open files. Raises OSError if none is left to list them."""
    return len(os.listdir("/dev/fd")) - 1  # minus the listing itself
