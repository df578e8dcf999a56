"""Exit codes of the engine process: its parent ended; a step took longer than the watchdog allows; another rank ended
or sent no heartbeat."""

from glm5.common import watching

ORPHANED, HUNG, LOST = 70, 71, 72


def reason_of_exit(code: int) -> str:
    """Describe an exit code. It is negative for a signal, as in `subprocess`."""
    if code == HUNG:
        return f"its process ended itself, as a step hung (exit code {code})"
    return watching.reason_of_exit(code)
