"""The only place that writes to standard output. Results of commands go here; status goes to the log."""

import sys
from contextlib import suppress


def out(text: str = "", end: str = "\n", flush: bool = False) -> None:
    """Write `text` to standard output. `flush` shows it at once (streamed answers)."""
    sys.stdout.write(text + end)
    if flush:
        sys.stdout.flush()


def tell(text: str) -> None:
    """Write what a server says about itself. A line that cannot be written is dropped, and changes nothing: the reader
    of a pipe may have gone, or the disk be full."""
    with suppress(OSError):
        out(text, flush=True)
