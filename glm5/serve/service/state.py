"""The state of the server: whether it serves, drains or closes, and how many requests are running.

The event loop counts requests; the main thread starts, drains and waits (`glm5.serve.operations.supervise`).
"""

import threading
import time
from collections.abc import Callable
from typing import Any


class ServerState:
    """`not_serving`: why the model does not answer although the server listens; None while it does.
    `is_closing`: the engine is being closed on purpose, which aborts running requests. `num_restarts`: of dead
    engines. `is_main_silent`: this is a front end, and the main process does not answer. `on_change` is called after
    `change`."""

    def __init__(self, not_serving: str | None = None) -> None:
        self.not_serving = not_serving
        self.is_draining = False
        self.is_closing = False
        self.num_restarts = 0
        self.is_main_silent = False
        self.num_active = 0
        self.on_change: Callable[[], None] | None = None
        self._changed = threading.Condition()

    def change(self, **values: Any) -> None:
        """Set attributes. Call it on the main thread."""
        for name, value in values.items():
            setattr(self, name, value)
        if self.on_change is not None:
            self.on_change()

    def enter(self) -> None:
        """Count a request that must be answered before the server may exit."""
        with self._changed:
            self.num_active += 1

    def leave(self) -> None:
        with self._changed:
            self.num_active -= 1
            self._changed.notify_all()

    def set_active(self, count: int) -> None:
        """Where other processes run the requests: how many do."""
        with self._changed:
            self.num_active = count
            self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait up to so many seconds until no request is running; returns whether that is so."""
        until = time.monotonic() + seconds
        with self._changed:
            while self.num_active and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self.num_active
