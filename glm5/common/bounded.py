"""Files from elsewhere, read whole: only regular ones, and only up to a size.

A checkpoint, or whoever names a file, may bring a device that never ends, a pipe that never begins or far more than
fits into memory. All of them are refused before they are read.
"""

import os
import stat
from typing import BinaryIO

from glm5.common.errors import CheckpointError, GlmError

MIB = 2**20
SETTINGS = 16 * MIB
"""Of what people or programs set: configs and recipes. The largest of published checkpoints have less than 1 MiB."""
TABLES = 256 * MIB
"""Of what grows with a model: tokenizers and indexes of tensors. The largest published have 35 MiB."""
TEXTS = 4096 * MIB
"""Of texts that are read whole."""


def read_bounded(path: str | os.PathLike[str], max_bytes: int, error: type[GlmError] = CheckpointError) -> bytes:
    """The content of a regular file of at most `max_bytes` bytes.

    Anything else at that path raises `error`; a file that is missing or may not be read raises OSError.
    """
    with open_regular(path, error) as file:
        # Asked for its size first, since a buffer of the largest one would be allocated otherwise.
        content = file.read() if os.fstat(file.fileno()).st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise error(f"{path} is larger than {_spelled(max_bytes)}, the most that is read of such a file")
    return content


def read_bounded_text(path: str | os.PathLike[str], max_bytes: int, error: type[GlmError] = CheckpointError) -> str:
    """The same as text; UnicodeDecodeError where it is not UTF-8. Line ends of all systems become newlines."""
    return read_bounded(path, max_bytes, error).decode().replace("\r\n", "\n").replace("\r", "\n")


def open_regular(path: str | os.PathLike[str], error: type[GlmError] = CheckpointError) -> BinaryIO:
    """A regular file, open for reading; the same errors."""
    # Without O_NONBLOCK, opening a pipe waits for somebody to write into it.
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
