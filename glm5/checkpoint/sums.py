"""The checksum of a bucket of a push (handover.py makes it, push.py compares it).

the CRC-32 of the CRC-32s of each MiB, which threads compute at the same time
"""

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from glm5.common.cores import usable_cores

PART_BYTES = 1 << 20
_MAX_THREADS = 16


def checksum(read: Callable[[int, int], bytes | memoryview], num_bytes: int) -> int:
    """The checksum of `num_bytes` bytes; `read(start, stop)` gives some of them, in several threads."""

    def of_part(start: int) -> bytes:
        return zlib.crc32(read(start, min(start + PART_BYTES, num_bytes))).to_bytes(4, "little")

    with ThreadPoolExecutor(min(_MAX_THREADS, usable_cores())) as threads:
        return zlib.crc32(b"".join(threads.map(of_part, range(0, num_bytes, PART_BYTES))))
