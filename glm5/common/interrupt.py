"""Signals: Ctrl-C held back while something must not be cut in half, ends with a parent's, and what they are called."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
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
    if os.getppid() != parent:  # it ended before the check
        os._exit(1)


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, where the previous handler gets it.

    Has no effect outside of the main thread, or if Python does not handle Ctrl-C.
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
    """In the block SIGTERM raises SystemExit, so that unfinished work is cleaned up. A second one ends the process at
    once. Has no effect outside of the main thread, or if SIGTERM already has a handler."""
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
def noted_interrupt(says: str = "", first: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """A list that receives SIGINT and SIGTERM, for a loop to check between steps. A second signal goes to the previous
    handler. The list stays empty outside of the main thread.

    `says`: a message for stderr, written after the signal's name when it arrives. `first`: called before.
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
            first()
            begin = "\n" if os.isatty(2) else ""  # after a progress bar, or ^C
            with suppress(OSError):  # not print: a handler may interrupt another write
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
