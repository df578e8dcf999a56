"""Checks that a folder is writable, before hours of work."""

import tempfile
from pathlib import Path


def try_to_write(folder: Path, num_bytes: int = 1) -> None:
    """Write so many bytes to a temporary file. Raises OSError if that fails."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        left = num_bytes
        while left:
            left -= file.write(bytes(left))
