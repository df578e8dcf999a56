"""Reads untrusted files: only regular ones, and only up to a maximum size.

A path from a checkpoint or a user may lead to an endless device, a pipe without a writer, or a file that does not fit
into memory. These are refused before they are read.
"""

import os
import stat
from typing import BinaryIO

from glm5.common.errors import CheckpointError, GlmError

MIB = 2**20
SETTINGS = 16 * MIB
"""Limit for configs and recipes. In published checkpoints they have less than 1 MiB."""
TABLES = 256 * MIB
"""Limit for tokenizers and tensor indexes, which grow with a model. The largest published have 35 MiB."""
TEXTS = 4096 * MIB
"""Limit for texts."""


def read_bounded(path: str | os.PathLike[str], max_bytes: int, error: type[GlmError] = CheckpointError) -> bytes:
    """The content of a regular file of at most `max_bytes` bytes.

    Anything else at that path raises `error`; a file that is missing or may not be read raises OSError.
    """
    with open_regular(path, error) as file:
        # The size is checked first, because read(max_bytes) would allocate a buffer of that size.
        content = file.read() if os.fstat(file.fileno()).st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise error(f"{path} is larger than {_spelled(max_bytes)}, the most that is read of such a file")
    return content


def read_bounded_text(path: str | os.PathLike[str], max_bytes: int, error: type[GlmError] = CheckpointError) -> str:
    """The content as text, with all line ends as newlines. Raises UnicodeDecodeError if it is not UTF-8."""
    return read_bounded(path, max_bytes, error).decode().replace("\r\n", "\n").replace("\r", "\n")


def open_regular(path: str | os.PathLike[str], error: type[GlmError] = CheckpointError) -> BinaryIO:
    """Open a regular file for reading, with the same errors."""
    # Without O_NONBLOCK, opening a pipe blocks until it has a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise error(f"{path} is not a regular file (a folder, a device or a pipe): put a plain file there")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _spelled(size: int) -> str:
    return f"{size // MIB} MiB" if size % MIB == 0 else f"{size} bytes"
