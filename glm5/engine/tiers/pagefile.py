"""One page in one file, written atomically and verified by checksums when it is read.

    magic 8 | version 4 | page_size 4 | fingerprint 16 | key 16 | payload bytes 8 | payload CRC-32 4
    token ids 4 * page_size | blake2b of all of the above 16 | payload                         (little-endian)

There is no fsync: after a power failure a lost page is a miss, and an incomplete one fails its checksum. The digest
protects the header, the header's CRC-32 the payload (it detects any burst of up to 32 bits, other damage with
probability 1 - 2**-32). Files contain token ids of prompts in plain text: only their owner may read them.
"""

import os
import stat
import struct
import zlib
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from glm5.engine.tiers.key import PageKey
from glm5.engine.tiers.layout import PageLayout

MAGIC, VERSION = b"GLM5PAGE", 1
FIELDS = struct.Struct("<8sII16s16sQI")
DIGEST_BYTES = 16


class BadPageFile(Exception):
    """The file is not the page of its name; the message gives the reason."""


def file_bytes(layout: PageLayout) -> int:
    """Size of every file of this layout."""
    return _header_bytes(layout) + layout.num_bytes


def checksum_of(block: Tensor) -> int:
    return zlib.crc32(block.numpy().data)


def write_page_file(
    path: Path, layout: PageLayout, key: PageKey, block: Tensor, checksum: int, *, writer: str, stamp_ns: int
) -> None:
    """Write the page to a temporary file, then rename it to `path`. `writer` must be unique; `stamp_ns`: the mtime.

    Raises OSError; `path` is then unchanged.
    """
    building = path.with_name(f".{path.name}.{writer}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(building, flags, 0o600)
        try:
            _write_all(descriptor, (_header(layout, key, checksum), block.numpy().data))
            os.utime(descriptor, ns=(stamp_ns, stamp_ns))
        finally:
            os.close(descriptor)
        building.replace(path)
    except BaseException:
        _remove(building)
        raise


def read_page_file(path: Path, layout: PageLayout, key: PageKey, block: Tensor) -> int:
    """Fill `block` from the file and return its checksum. Raises BadPageFile or OSError; `block` is then garbage."""
    # Opening must neither block on a pipe nor follow a link.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise BadPageFile("not a regular file")
        if found.st_size != file_bytes(layout):
            raise BadPageFile(f"{found.st_size} bytes instead of {file_bytes(layout)}")
        found_header = bytearray(_header_bytes(layout))
        _read_all(descriptor, memoryview(found_header))
        checksum = FIELDS.unpack_from(found_header)[-1]
        if bytes(found_header) != _header(layout, key, checksum):
            raise BadPageFile("header is damaged or another page's")
        _read_all(descriptor, block.numpy().data)
    finally:
        os.close(descriptor)
    if checksum_of(block) != checksum:
        raise BadPageFile("content is damaged")
    return checksum


def _header_bytes(layout: PageLayout) -> int:
    return FIELDS.size + 4 * layout.page_size + DIGEST_BYTES


def _header(layout: PageLayout, key: PageKey, checksum: int) -> bytes:
    assert len(key.tokens) == 4 * layout.page_size, f"{len(key.tokens)=} {layout.page_size=}"
    fields = (MAGIC, VERSION, layout.page_size, layout.fingerprint, key.digest, layout.num_bytes, checksum)
    guarded = FIELDS.pack(*fields) + key.tokens
    return guarded + blake2b(guarded, digest_size=DIGEST_BYTES).digest()


def _write_all(descriptor: int, pieces: Iterable[bytes | memoryview]) -> None:
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _read_all(descriptor: int, rest: memoryview) -> None:
    while rest:
        count = os.readv(descriptor, [rest])
        if not count:
            raise BadPageFile("truncated while it was read")
        rest = rest[count:]


def _remove(path: Path) -> None:
    """Remove the file if possible; `PageFolder.listing` deletes it later otherwise."""
    try:
        path.unlink()
    except OSError:
        return
