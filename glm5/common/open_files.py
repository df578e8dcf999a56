"""Files, sockets and pipes that this process may have open at a time: every connection is one of them."""

import os
import resource
import sys
from contextlib import suppress


def allow_many() -> None:
    """Raise this process's limit as far as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """How many may be open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """How many are open. Raises OSError where none is left to look with."""
    return len(os.listdir("/dev/fd")) - 1  # without the one that looks
