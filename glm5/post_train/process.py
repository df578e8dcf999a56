"""A command of glm5 as a process of its own: its memory is given back, its end is named, it ends with whoever began
it."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from glm5.common.errors import TrainingError
from glm5.common.interrupt import end_with_parent
from glm5.common.watching import reason_of_exit

logger = logging.getLogger(__name__)

INTERRUPTED = (130, 143)
_KIB = 2**10


def run_glm5(arguments: Sequence[str], what: str) -> dict[str, Any]:
    """Run `glm5 ARGUMENTS` to its end; returns seconds, seconds of processor time (its own processes included), and
    bytes of the largest process. `what`: its name in messages. Raises TrainingError if it fails; on Ctrl-C and SIGTERM
    it is told so once, and waited for."""
    began = time.monotonic()
    # In a session of its own, so that Ctrl-C reaches this process alone, which passes it on.
    process = subprocess.Popen(
        [sys.executable, "-m", "glm5", *arguments],
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except (KeyboardInterrupt, SystemExit):
        process.terminate()
        logger.warning("%s is stopped; the same command goes on from there", what)
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode in INTERRUPTED:
        raise KeyboardInterrupt
    if process.returncode:
        raise TrainingError(
            f"{what}: {reason_of_exit(process.returncode)}. The same command goes on from what it had saved"
        )
    cpu = usage.ru_utime + usage.ru_stime
    return {"seconds": time.monotonic() - began, "cpu_seconds": cpu, "peak_bytes": usage.ru_maxrss * _KIB}
