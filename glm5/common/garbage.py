"""Garbage collection of a process that serves: what it has loaded stays, and what requests make comes and goes.

A request leaves nothing that only a collection finds (tests/unit/serve/test_garbage.py), so collections can be rare.
With a thousand conversations in memory, they took half of a request's time (docs/log.md, 2026-11-28).
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

SERVER = 5_000
"""New objects between collections, each of which takes 3 ms then: users wait for tokens meanwhile."""
TRAINER = 500_000
"""More than a step of 5,000 rollouts makes at a time (300,000): collections would look through them again and again
while they are played. Nobody waits for a pause of 200 ms there."""


def settle() -> None:
    """Exempt all objects that are there from collections, and collect less often, until the process ends."""
    atexit.register(gc.unfreeze)  # else extension modules report what the interpreter could not free as leaks
    _settle(SERVER)


@contextmanager
def settled() -> Iterator[None]:
    """The same inside the block, as a trainer's process needs it."""
    before = gc.get_threshold()
    _settle(TRAINER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _settle(threshold: int) -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(threshold, 20, 20)
