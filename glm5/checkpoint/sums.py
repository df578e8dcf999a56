"""The checksum of a bucket of a push (handover.py makes it, push.py compares it).

the CRC-32 of the sums of each MiB and of the bytes after the last one

A sum of 64-bit words, which wraps around, is read as fast as memory is; a CRC-32 of all bytes takes four times as long.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from glm5.common.cores import usable_cores

PART_BYTES = 1 << 20
_PARTS_AT_A_TIME = 8
_MAX_THREADS = 8


def checksum(data: Tensor) -> int:
    """The checksum of some bytes (uint8), computed where they are."""
    num_whole = len(data) // PART_BYTES * PART_BYTES
    whole, rest = data[:num_whole], data[num_whole:].cpu().numpy().tobytes()
    return zlib.crc32(rest, zlib.crc32(_sums(whole) if data.device.type == "cpu" else _sums_on_device(whole)))


def _sums(data: Tensor) -> bytes:
    parts = data.numpy().view("<u8").reshape(-1, PART_BYTES // 8)

    def sums(first: int) -> bytes:
        return parts[first : first + _PARTS_AT_A_TIME].sum(axis=1, dtype="<u8").tobytes()

    with ThreadPoolExecutor(min(_MAX_THREADS, usable_cores())) as threads:
        return b"".join(threads.map(sums, range(0, len(parts), _PARTS_AT_A_TIME)))


def _sums_on_device(data: Tensor) -> bytes:
    return data.view(torch.int64).view(-1, PART_BYTES // 8).sum(dim=1).cpu().numpy().astype("<i8").tobytes()
