"""The one door to standard output. What a command answers goes here; what it reports goes to the log."""

import sys


def out(text: str = "", end: str = "\n", flush: bool = False) -> None:
    """Write `text` to standard output. `flush` shows it at once (streamed answers)."""
    sys.stdout.write(text + end)
    if flush:
        sys.stdout.flush()
