"""The checksum of a bucket of a push (handover.py makes it, push.py compares it).

the CRC-32 of the sums of each MiB, which threads compute at the same time

A sum of 64-bit words, which wraps around, is read as fast as memory is; a CRC-32 of all bytes takes four times as long.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from glm5.common.cores import usable_cores

PART_BYTES = 1 << 20
_PARTS_AT_A_TIME = 8
_MAX_THREADS = 8


def checksum(data: memoryview) -> int:
    """The checksum of some bytes."""
    num_whole = len(data) // PART_BYTES * PART_BYTES
    parts = np.frombuffer(data[:num_whole], "<u8").reshape(-1, PART_BYTES // 8)

    def sums(first: int) -> bytes:
        return parts[first : first + _PARTS_AT_A_TIME].sum(axis=1, dtype="<u8").tobytes()

    with ThreadPoolExecutor(min(_MAX_THREADS, usable_cores())) as threads:
        found = b"".join(threads.map(sums, range(0, len(parts), _PARTS_AT_A_TIME)))
    return zlib.crc32(data[num_whole:], zlib.crc32(found))
