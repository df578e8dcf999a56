"""Whether a folder can be written to, found out before hours of work go there."""

import tempfile
from pathlib import Path


def try_to_write(folder: Path, num_bytes: int = 1) -> None:
    """Write so many bytes into a file that is gone at once. Raises OSError where that cannot be done."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        left = num_bytes
        while left:
            left -= file.write(bytes(left))
