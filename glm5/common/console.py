"""The only place that writes to standard output. Results of commands go here; status goes to the log."""

import sys


def out(text: str = "", end: str = "\n", flush: bool = False) -> None:
    """Write `text` to standard output. `flush` shows it at once (streamed answers)."""
    sys.stdout.write(text + end)
    if flush:
        sys.stdout.flush()
