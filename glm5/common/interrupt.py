"""Signals: Ctrl-C held back while something must not be cut in half, ends with a parent's, and what they are called."""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_PR_SET_PDEATHSIG = 1


def signal_name(number: int) -> str:
    """`SIGKILL` of 9; real-time signals, which Python has no names for, by number."""
    return signal.Signals(number).name if number in {one.value for one in signal.Signals} else f"signal {number}"


def end_with_parent(parent: int) -> None:
    """Kill this process when the one that started it, `parent`, is gone, however that ended (Linux; prctl(2))."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it was asked
        os._exit(1)


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


@contextmanager
def orderly_end() -> Iterator[None]:
    """Inside, a request to end (SIGTERM) is a SystemExit: what was begun is taken back on the way out. A second one
    ends the process at once. Elsewhere than in the main thread, or where somebody listens already, nothing is done."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def noted_interrupt(says: str = "") -> Iterator[list[int]]:
    """A list that Ctrl-C and a request to end (SIGTERM) fill, for a loop to look at between two steps. A second one
    acts at once, by whatever handler there was before. Elsewhere than in the main thread it stays empty.

    `says`: what stderr is told behind the signal's name as soon as it has come.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        restore()
        if says:
            begin = "\n" if os.isatty(2) else ""  # behind a bar, or ^C
            with suppress(OSError):  # not by print: a handler may run in the midst of another write
                os.write(2, f"{begin}{signal_name(number)}: {says}\n".encode())

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
