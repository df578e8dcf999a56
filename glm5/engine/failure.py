"""Why an engine ended, in words for the person who runs it."""

import signal
from pathlib import Path

from glm5.common.interrupt import signal_name

ORPHANED, HUNG, LOST = 70, 71, 72
"""Exit codes of the engine process: its parent ended; a step took longer than the watchdog allows; another rank ended
or said nothing."""

_MEMORY = (
    "; out of memory: lower gpu_memory_utilization or kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs"
)


def words_of(error: BaseException) -> str:
    """An exception's message as it can be sent: what it quotes may hold halves of characters, as JSON's escapes may."""
    return str(error).encode(errors="backslashreplace").decode()


def reason_of(error: BaseException) -> str:
    """Type and message of an exception, and what to do where memory ran out."""
    reason = f"{type(error).__name__}: {words_of(error)}".rstrip(": ")
    return reason + _MEMORY if is_of_memory(error) else reason


def is_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. By name and text: clients do not import torch, which on a CPU raises a RuntimeError."""
    by_name = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return by_name or "can't allocate memory" in str(error)


def reason_of_exit(code: int) -> str:
    """What an exit code says, negative for a signal as `subprocess` has it."""
    if code == HUNG:
        return f"its process ended itself, as a step hung (exit code {code})"
    if code >= 0:
        return f"its process ended with exit code {code}; its last lines on stderr may say why"
    cause = " (by hand, or by the system for lack of memory)" if -code == signal.SIGKILL else ""
    return f"its process was killed by {signal_name(-code)}{cause}"


def silence(pid: int, seconds: float, watchdog_timeout: float, meanwhile: str = "") -> str:
    """Why a process that has said nothing for so long was killed; asked before that. `meanwhile`: what that held up."""
    how = "it was stopped" if is_stopped(pid) else "it was stopped or hangs"
    words = f"its process said nothing for {seconds:.1f} s{meanwhile} (watchdog_timeout is {watchdog_timeout:g} s)"
    return f"{words}; {how}, and has been killed"


def is_stopped(pid: int) -> bool:
    """Whether a process stands still by SIGSTOP, or under a debugger. Linux tells; elsewhere nobody is said to."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")  # behind the command's name, which may hold anything
