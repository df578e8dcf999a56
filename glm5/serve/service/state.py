"""What the server is doing: whether it serves, whether it takes more, and what is still under way.

The event loop counts requests in and out; the main thread starts, drains and waits (`glm5.serve.operations.supervise`).
"""

import threading
import time


class ServerState:
    """`not_serving`: why the model does not answer although the server listens; None while it does.
    `is_closing`: the engine is ended on purpose, and with it what is still under way."""

    def __init__(self, not_serving: str | None = None) -> None:
        self.not_serving = not_serving
        self.is_draining = False
        self.is_closing = False
        self.num_active = 0
        self._changed = threading.Condition()

    def enter(self) -> None:
        """A request has come that has to be answered before the server may end."""
        with self._changed:
            self.num_active += 1

    def leave(self) -> None:
        with self._changed:
            self.num_active -= 1
            self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> bool:
        """Whether nothing is under way, at the latest after so many seconds."""
        until = time.monotonic() + seconds
        with self._changed:
            while self.num_active and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self.num_active
