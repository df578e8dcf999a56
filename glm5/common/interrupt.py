"""Ctrl-C held back while something must not be cut in half."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C waits; at the end of the block it comes, by whatever handler there was before.

    Elsewhere than in the main thread, which alone is interrupted, nothing is done; nor where Ctrl-C is not Python's.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)
