"""What tests of processes wait for, and an object for one of them."""

import threading
import time
from collections.abc import Callable

from glm5.common.errors import ConfigError


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition of other processes. AssertionError after so long."""
    tick, deadline = threading.Event(), time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to pass"
        tick.wait(0.01)


class Remembering:
    """Called from another process."""

    concurrent = frozenset({"release"})

    def __init__(self, start: int) -> None:
        if not isinstance(start, int):
            raise ConfigError(f"got {start}")
        self.sum, self._released = start, threading.Event()

    def add(self, number: int) -> int:
        self.sum += number
        return self.sum

    def echo(self, text: str) -> str:
        print("printed")  # to stderr: answers are on the other pipe
        return text

    def refuse(self, number: int) -> None:
        raise ConfigError(f"no {number}")

    def divide(self) -> float:
        return 1 / 0

    def wait_for_release(self) -> None:
        assert self._released.wait(60)

    def release(self) -> None:
        self._released.set()
