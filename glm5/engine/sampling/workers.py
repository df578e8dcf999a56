"""Threads for jobs of which some take very long, or never end: these hold up neither each other nor the rest.

A job that has run for `slow_s` keeps its thread to itself, and another thread takes that one's place, up to `max_slow`
times. Threads cannot be ended from outside; these are daemons, for which the process does not wait, and with a slow job
they step back behind other threads where the operating system lets them.
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

_NICENESS = 5  # of a slow thread: it gets a third of what others get


class Workers(Generic[Job]):
    """`run` is called with each job, in order, on some thread; it may not raise. Any thread may `put` and `refill`."""

    def __init__(self, run: Callable[[Job], None], *, num_threads: int, max_slow: int, slow_s: float) -> None:
        self._run, self._num_threads, self._max_slow, self._slow_s = run, num_threads, max_slow, slow_s
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._is_closed = False
        self.threads: list[threading.Thread] = []
        self._since: dict[threading.Thread, float] = {}  # when the job of a busy thread began
        # Slow ones, whose place another has taken; they end after their job.
        self._behind: set[threading.Thread] = set()

    @property
    def num_waiting(self) -> int:
        """Jobs that no thread has started."""
        return len(self._jobs)

    def put(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()
        self.refill()

    def refill(self) -> None:
        """Start threads where there are too few. Whoever waits for a job calls this now and then."""
        with self._changed:
            slow = {thread for thread in self._since if self._is_slow(thread)}
            for thread in slow - self._behind:
                _lower_priority(thread)
            self._behind |= slow
            missing = self._num_threads + len(self._behind) - len(self.threads)
            for _ in range(min(missing, self._max_slow + self._num_threads - len(self.threads))):
                thread = threading.Thread(target=self._work, name="grammar", daemon=True)
                self.threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Threads end when they are done with what has been put."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_slow(self, thread: threading.Thread) -> bool:
        return time.monotonic() > self._since[thread] + self._slow_s

    def _work(self) -> None:
        thread = threading.current_thread()
        while (job := self._next(thread)) is not None:
            self._run(job)
            del job  # this may be the last reference to it
            with self._changed:
                del self._since[thread]
        with self._changed:
            self.threads.remove(thread)
            self._behind.discard(thread)
            if self._jobs:
                self.refill()

    def _next(self, thread: threading.Thread) -> Job | None:
        """None: this thread is to end, as another has taken its place or nothing more will come."""
        with self._changed:
            while thread not in self._behind and not self._jobs and not self._is_closed:
                self._changed.wait()
            if thread in self._behind or not self._jobs:
                return None
            self._since[thread] = time.monotonic()
            return self._jobs.popleft()


def _lower_priority(thread: threading.Thread) -> None:
    if sys.platform == "linux" and thread.native_id is not None:  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id, _NICENESS)
