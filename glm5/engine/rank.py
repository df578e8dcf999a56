"""The process of a rank other than the first: `python -m glm5.engine.rank`, started only by `ranks.Ranks`.

stdin     orders (rank_wire.py); when it closes, the first rank has ended, and this process exits
stdout    heartbeats, replies and the final message as JSON lines, as in an engine process (process.py)
"""

import ctypes
import gc
import logging
import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from glm5.common import log
from glm5.common.errors import GlmError, reason_of, words_of
from glm5.engine.distributed.rank_wire import (
    Begin,
    End,
    Order,
    read_all,
)
from glm5.engine.transport.failure import ORPHANED
from glm5.engine.transport.heartbeat import Heartbeat, take_stdout
from glm5.engine.transport.wire import Dead

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    """Execute orders until `End`. Exits the process in every case."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):  # Linux: kills also a stopped process, which cannot read that stdin closed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    heartbeat = Heartbeat(take_stdout())
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    began = False
    try:
        begin = orders.get()
        assert isinstance(begin, Begin), f"{begin=}"
        log.configure(begin.start.log_level, begin.start.log_style)
        heartbeat.start(begin.start.config["watchdog_timeout"])
        from glm5.engine.build import build_follower

        follower = build_follower(begin, heartbeat.send)
        gc.collect()
        gc.freeze()
        began = True
        while not isinstance(order := orders.get(), End):
            with heartbeat.busy():
                follower.execute(order)
    except BaseException as error:  # whatever it was, the first rank must get it
        is_user_error = isinstance(error, GlmError) and not began
        if not is_user_error:
            logger.exception("a rank of the engine ends")
        reason = words_of(error) if is_user_error else reason_of(error)
        heartbeat.end(Dead(reason, type(error).__name__ if is_user_error else "EngineDead"), code=1)
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)


def _listen(orders: "queue.SimpleQueue[Order]") -> NoReturn:
    with suppress(OSError, EOFError), os.fdopen(os.dup(0), "rb") as pipe:
        for order in read_all(pipe):
            orders.put(order)
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
