"""How a process that sends heartbeats is watched, and why it ended, in words for the person who runs it."""

import signal
import time
from pathlib import Path

from glm5.common.interrupt import signal_name

BEAT_SECONDS = 1.0


class Silence:
    """How long a process has sent nothing. `first`, `later`: seconds that are allowed before and after it first sends
    something. A wait counts for no longer than was intended: whoever waits may itself have been stopped meanwhile."""

    def __init__(self, first: float, later: float):
        self.seconds, self._allowed, self._later = 0.0, first, later

    @property
    def is_too_long(self) -> bool:
        return self.seconds > self._allowed

    def end(self) -> None:
        """It has sent something."""
        self.seconds, self._allowed = 0.0, self._later

    def wait(self, since: float, intended: float) -> None:
        """Nothing has come since that monotonic time, for `intended` seconds."""
        self.seconds += min(time.monotonic() - since, intended)


def reason_of_exit(code: int) -> str:
    """Describe an exit code. It is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"its process ended with exit code {code}; its last lines on stderr may say why"
    cause = " (by hand, or by the system for lack of memory)" if -code == signal.SIGKILL else ""
    return f"its process was killed by {signal_name(-code)}{cause}"


def reason_of_silence(pid: int, seconds: float, watchdog_timeout: float, meanwhile: str = "") -> str:
    """Why a process without heartbeats is killed. Call it before the kill. `meanwhile`: what the process held up."""
    words = f"its process sent no heartbeat for {seconds:.1f} s{meanwhile} (watchdog_timeout is {watchdog_timeout:g} s)"
    return f"{words}; {how_silent(pid)}, and has been killed"


def how_silent(pid: int) -> str:
    """What may have silenced a process that runs."""
    return "it was stopped" if is_stopped(pid) else "it was stopped or hangs"


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger has stopped a process. Only Linux reports it; elsewhere the result is False."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")  # after the command's name, which may contain anything
