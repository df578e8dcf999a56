"""Memory of the machine, in bytes."""

import os
import re
from pathlib import Path


def total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available() -> int:
    """What may be taken without harm. Linux counts what its file cache would give back; elsewhere all must do."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(found[1]) * 1024 if found else total()
