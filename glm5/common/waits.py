"""What a start waits for, said in the log every few seconds: nobody who watches it has to wonder whether it hangs."""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
SILENT_SECONDS = 4.0  # with the time until somebody looks, less than 5


class Waits:
    """`what` is waited for: said in a line when nothing was said of it for SILENT_SECONDS, and again and again.

    Inside the block a thread looks at the clock every LOOK_SECONDS.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock, self._over = clock, threading.Lock(), threading.Event()
        self.begin(what)

    def begin(self, what: str) -> None:
        """What was waited for is there; from now on it is this."""
        with self._lock:
            self.what, self._share = what, 0.0
            self._began = self._said = self._clock()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._began

    def at(self, share: float, *, is_shown: bool = False) -> None:
        """How far it is, 0 to 1. `is_shown`: somebody else has just said so."""
        with self._lock:
            self._share = share
            if is_shown:
                self._said = self._clock()

    def look(self) -> None:
        """Say it, if it is time."""
        with self._lock:
            now = self._clock()
            if now - self._said < SILENT_SECONDS:
                return
            self._said = now
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
