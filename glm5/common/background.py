"""Background threads."""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(job: Callable[[], Result], name: str) -> "Future[Result]":
    """Run `job` on a daemon thread, so that a job that hangs does not keep the process from exiting."""
    future: Future[Result] = Future()
    threading.Thread(target=_work, args=(job, future), name=name, daemon=True).start()
    return future


def _work(job: Callable[[], Result], future: "Future[Result]") -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 - raised again by the future
        # Its frames may hold tensors as large as the weights until garbage collection.
        traceback.clear_frames(error.__traceback__)
        future.set_exception(error)
    finally:
        del job, future  # from this frame, which is one of them
