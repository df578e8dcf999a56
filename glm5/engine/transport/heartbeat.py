"""Signs of life of a process of the engine, last words, and the watchdog that ends it when a step hangs."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, Protocol

import msgspec

from glm5.engine.transport.failure import HUNG, LOST, ORPHANED
from glm5.engine.transport.wire import Beat, Dead

BEAT_SECONDS = 1.0
_MAX_REASON = 2000  # characters; what is shorter than a page is written to a pipe as a whole or not at all


class Ranks(Protocol):
    """Processes that this one computes with (ranks.py)."""

    def explain(self) -> None: ...

    def kill(self) -> None: ...

    def held_up_by(self, rank: int) -> str | None: ...


class Heartbeat:
    """Says now and then that the process lives, and ends it when a step takes too long.

    `busy_since`: start of the step that runs, None between steps. `ranks`: they end with this process.
    """

    ranks: Ranks | None = None

    def __init__(self, pipe: int):
        self.num_steps: int = 0
        self.busy_since: float | None = None
        self._pipe, self._parent, self._lock = pipe, os.getppid(), threading.Lock()
        self._ending = threading.Lock()
        self._watchdog = float("inf")

    def start(self, watchdog_timeout: float) -> None:
        self._watchdog = watchdog_timeout
        threading.Thread(target=self._run, daemon=True, name="glm5-heartbeat").start()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A step."""
        self.busy_since = time.monotonic()
        yield
        self.busy_since = None
        self.num_steps += 1

    def end(self, last_words: Dead, code: int) -> NoReturn:
        """Any thread may; the first reason is told, as what follows from it is not why."""
        self._ending.acquire()
        last_words.reason = last_words.reason[:_MAX_REASON]
        if self.ranks is not None:
            self.ranks.kill()
        self.say(last_words)
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)

    def _run(self) -> None:
        interval = threading.Event()
        while not interval.wait(min(BEAT_SECONDS, self._watchdog / 4)):
            if os.getppid() != self._parent:  # its end of stdin may live on in a process that it forked
                os._exit(ORPHANED)
            since = self.busy_since
            busy = 0.0 if since is None else time.monotonic() - since
            if busy > self._watchdog:
                _dump_stacks()
                if self.ranks is not None and (reason := self.ranks.held_up_by(0)) is not None:
                    self.end(Dead(reason), LOST)
                self.end(Dead(_hung(busy, self._watchdog)), HUNG)
            self.say(Beat(self.num_steps, busy))

    def say(self, message: msgspec.Struct) -> None:
        """A line on stdout."""
        with self._lock, suppress(OSError):  # the parent has gone, or has not listened until the pipe was full
            os.write(self._pipe, msgspec.json.encode(message) + b"\n")


def _hung(busy: float, allowed: float) -> str:
    return f"a step hung for {busy:.1f} s; watchdog_timeout allows {allowed:g} s, and stderr shows where it stands"


def _dump_stacks() -> None:
    import faulthandler

    with suppress(OSError, ValueError, RuntimeError):  # stderr may be closed
        faulthandler.dump_traceback(all_threads=True)


def take_stdout() -> int:
    """The pipe that stdout is. What others print from now on goes to stderr."""
    pipe = os.dup(1)  # not inherited: it ends when this process does, whatever it started
    os.set_blocking(pipe, False)
    with suppress(OSError):
        os.dup2(2, 1)
    return pipe
