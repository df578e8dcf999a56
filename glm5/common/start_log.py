"""Logs every few seconds what a start is waiting for, so that it does not seem to hang."""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
SILENT_SECONDS = 4.0  # plus LOOK_SECONDS: less than 5


class Waits:
    """Logs a line about `what` whenever none was logged for SILENT_SECONDS.

    Inside the block a thread checks the time every LOOK_SECONDS.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock, self._over = clock, threading.Lock(), threading.Event()
        self.begin(what)

    def begin(self, what: str) -> None:
        """Start waiting for the next thing."""
        with self._lock:
            self.what, self._share = what, 0.0
            self._began = self._logged = self._clock()

    @property
    def seconds(self) -> float:
        """Seconds since this wait began."""
        return self._clock() - self._began

    def at(self, share: float, *, is_shown: bool = False) -> None:
        """Set the progress, 0 to 1. `is_shown`: it is already displayed elsewhere."""
        with self._lock:
            self._share = share
            if is_shown:
                self._logged = self._clock()

    def look(self) -> None:
        """Log a line if it is due."""
        with self._lock:
            now = self._clock()
            if now - self._logged < SILENT_SECONDS:
                return
            self._logged = now
            share = f", {100 * self._share:.0f} %" if self._share else ""
            logger.info("start: still %s%s, %.0f s", self.what, share, now - self._began)

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="glm5-waits", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.look()
