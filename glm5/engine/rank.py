"""A rank beside the first: `python -m glm5.engine.rank`, started by `ranks.Ranks` and by nobody else.

stdin     orders (rank_wire.py); when it ends, the first rank has ended, and so does this process
stdout    signs of life, answers and last words, JSON lines, as those of an engine process (process.py)
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
    """Follow until told to end. Ends the process in every case."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):  # Linux: also while it is stopped, when nobody reads the end of its stdin
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

        follower = build_follower(begin, lambda said: heartbeat.say(said))
        gc.collect()
        gc.freeze()
        began = True
        while not isinstance(order := orders.get(), End):
            with heartbeat.busy():
                follower.execute(order)
    except BaseException as error:  # the first rank must learn of it, whatever it was
        mine = isinstance(error, GlmError) and not began
        if not mine:
            logger.exception("a rank of the engine ends")
        heartbeat.end(
            Dead(words_of(error) if mine else reason_of(error), type(error).__name__ if mine else "EngineDead"), 1
        )
    sys.stderr.flush()
    os._exit(0)


def _listen(orders: "queue.SimpleQueue[Order]") -> NoReturn:
    with suppress(OSError, EOFError), os.fdopen(os.dup(0), "rb") as pipe:
        for order in read_all(pipe):
            orders.put(order)
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
