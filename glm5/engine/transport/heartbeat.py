"""Heartbeats of an engine's process, its final message, and the watchdog that ends it when a step hangs."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, Protocol

import msgspec

from glm5.common.watching import BEAT_SECONDS
from glm5.engine.transport.failure import HUNG, LOST, ORPHANED
from glm5.engine.transport.wire import Beat, Dead

_MAX_REASON = 2000  # characters; a write to a pipe is atomic below the size of a memory page


class Ranks(Protocol):
    """The processes of the other ranks (ranks.py)."""

    def wait_for_cause(self) -> None: ...

    def kill(self) -> None: ...

    def cause_of_hang(self, rank: int) -> str | None: ...


class Heartbeat:
    """Sends heartbeats to the parent, and ends the process when a step takes too long.

    `busy_since`: start of the running step, None between steps. `ranks`: they end with this process.
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
        """Mark one step as running."""
        self.busy_since = time.monotonic()
        yield
        self.busy_since = None
        self.num_steps += 1

    def end(self, death: Dead, code: int) -> NoReturn:
        """End the process, from any thread. Only the first reason is sent: later ones are its consequences."""
        self._ending.acquire()
        death.reason = death.reason[:_MAX_REASON]
        if self.ranks is not None:
            self.ranks.kill()
        self.send(death)
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)

    def _run(self) -> None:
        interval = threading.Event()
        while not interval.wait(min(BEAT_SECONDS, self._watchdog / 4)):
            if os.getppid() != self._parent:  # stdin may stay open in a process that the parent forked
                os._exit(ORPHANED)
            since = self.busy_since
            busy = 0.0 if since is None else time.monotonic() - since
            if busy > self._watchdog:
                _dump_stacks()
                if self.ranks is not None and (reason := self.ranks.cause_of_hang(0)) is not None:
                    self.end(Dead(reason), LOST)
                self.end(Dead(_hang_message(busy, self._watchdog)), HUNG)
            self.send(Beat(self.num_steps, busy))

    def send(self, message: msgspec.Struct) -> None:
        """Write one JSON line to stdout."""
        with self._lock, suppress(OSError):  # the parent has ended, or did not read until the pipe was full
            os.write(self._pipe, msgspec.json.encode(message) + b"\n")


def _hang_message(busy: float, allowed: float) -> str:
    return f"a step hung for {busy:.1f} s; watchdog_timeout allows {allowed:g} s, and stderr shows the stacks"


def _dump_stacks() -> None:
    import faulthandler

    with suppress(OSError, ValueError, RuntimeError):  # stderr may be closed
        faulthandler.dump_traceback(all_threads=True)


def take_stdout() -> int:
    """Return stdout's pipe. What libraries print from now on goes to stderr."""
    pipe = os.dup(1)  # not inherited: it closes with this process, whatever child processes live on
    os.set_blocking(pipe, False)
    with suppress(OSError):
        os.dup2(2, 1)
    return pipe
