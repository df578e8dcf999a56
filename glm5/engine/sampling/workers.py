"""Threads for jobs of which some take very long, or never end: these hold up neither each other nor the rest.

A job that has run for `slow_s` keeps its thread, and another thread takes that one's place, up to `max_slow` times.
Threads cannot be ended from outside; these are daemons, which the process does not wait for, and step back behind all
others where the operating system lets them.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

Job = TypeVar("Job")

_NICENESS = 10


class Workers(Generic[Job]):
    """`run` is called with each job, in order, on some thread; it may not raise. Any thread may `put` and `tend`."""

    def __init__(self, run: Callable[[Job], None], *, num_threads: int, max_slow: int, slow_s: float) -> None:
        self._run, self._num_threads, self._max_slow, self._slow_s = run, num_threads, max_slow, slow_s
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._is_closed = False
        self.threads: list[threading.Thread] = []
        self._since: dict[threading.Thread, float] = {}  # when the job of a busy thread began

    @property
    def num_waiting(self) -> int:
        """Jobs that nobody has begun."""
        return len(self._jobs)

    def put(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
        self.tend()

    def tend(self) -> None:
        """Start threads where there are too few. Whoever waits for a job calls this now and then."""
        with self._changed:
            missing = self._num_threads - self._num_quick()
            room = self._num_threads + self._max_slow - len(self.threads)
            for _ in range(min(missing, room)):
                thread = threading.Thread(target=self._work, name="grammar", daemon=True)
                self.threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Threads end when they are done with what has been put."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _num_quick(self) -> int:
        """Threads that wait for a job, or have not had theirs for long."""
        latest = time.monotonic() - self._slow_s
        return sum(self._since.get(thread, latest) >= latest for thread in self.threads)

    def _work(self) -> None:
        _step_back()
        thread = threading.current_thread()
        while (job := self._next(thread)) is not None:
            self._run(job)
            del job  # nobody may be waiting for it any more

    def _next(self, thread: threading.Thread) -> Job | None:
        with self._changed:
            self._since.pop(thread, None)
            while self._num_quick() <= self._num_threads:
                if self._jobs:
                    self._since[thread] = time.monotonic()
                    return self._jobs.popleft()
                if self._is_closed:
                    break
                self._changed.wait()
            # There are enough without this one, or none is needed any more.
            self.threads.remove(thread)
            return None


def _step_back() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
