"""Garbage collection of a process that serves: what it has loaded stays, and what requests make comes and goes."""

import atexit
import gc


def settle() -> None:
    """Exempt all objects that are there from collections, and collect less often. With a thousand conversations in
    memory, collections took half of a request's time (docs/log.md, 2026-11-28)."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules report what the interpreter could not free as leaks
    gc.set_threshold(5_000, 20, 20)
