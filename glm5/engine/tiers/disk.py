"""Pages in files of a folder that outlives the process and may be shared by several processes.

Reading never fails: a file that is missing, truncated, damaged or of another layout is a miss. Bad files are removed,
since only page files may have such names. Writing first evicts least recently used files. A write that the operating
system refuses (full, read-only, over quota) switches writing off permanently, with one warning.

Total size: at most `capacity_bytes`, counting the files that this process knows. It finds those of other processes
before it has written 1/16 of the capacity, so each further process may temporarily add about that much.
"""

import itertools
import logging
import os
import stat
import threading
import time
import uuid
from collections import deque
from pathlib import Path

from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.engine.tiers.folder import PageFolder
from glm5.engine.tiers.host import MAX_DROPPED
from glm5.engine.tiers.key import PageKey
from glm5.engine.tiers.layout import PageLayout
from glm5.engine.tiers.pagefile import BadPageFile, file_bytes, read_page_file, write_page_file

logger = logging.getLogger(__name__)

# How often the folder is scanned completely while this process writes as much as its capacity.
ROUNDS_PER_CAPACITY = 32


class DiskTier:
    """At most `capacity_bytes` of page files under `directory`, which is created. Thread-safe."""

    def __init__(self, directory: str | Path, capacity_bytes: int, layout: PageLayout):
        self.layout, self.capacity_bytes = layout, capacity_bytes
        self.directory = Path(directory)
        self.num_evicted = self.num_damaged = 0
        # Digests of dropped pages, until the queue reads them; bounded, the oldest are lost first.
        self.dropped: deque[bytes] = deque(maxlen=MAX_DROPPED)
        self.is_writable = True
        self._file_bytes, self._fingerprint = file_bytes(layout), layout.fingerprint.hex()
        self._writer = uuid.uuid4().hex[:8]
        self._folder = PageFolder(self.directory, self._writer)
        self._num_writes = itertools.count()
        self._reserved = self._last_stamp = 0
        self._warned_of_reading = False
        # `_lock` guards the bookkeeping; `_making_room` lets one thread at a time delete files.
        self._lock, self._making_room = threading.Lock(), threading.Lock()
        if capacity_bytes < self._file_bytes:
            raise ConfigError(
                f"disk tier: got {capacity_bytes} bytes, but the file of one page takes {self._file_bytes}; "
                "give more or none"
            )
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.scan()
        except (OSError, ValueError) as error:
            raise ConfigError(f"disk tier: cannot use {self.directory}: {error}; name another directory") from error
        self._reserve(0)

    def __len__(self) -> int:
        """Files of all layouts."""
        with self._lock:
            return len(self._folder)

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._folder.num_bytes

    def __contains__(self, key: PageKey) -> bool:
        """Whether a file of that name exists, of this process or another. It may still be damaged."""
        if self.holds(key.digest):
            return True
        name = self._name(key.digest)
        try:
            found = (self.directory / name).lstat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode):
            return False
        with self._lock:
            self._folder.used(name, found.st_size, found.st_mtime_ns)
        return True

    def holds(self, digest: bytes) -> bool:
        """The same without file access: files that others wrote since the last scan are missing."""
        with self._lock:
            return self._name(digest) in self._folder

    def read(self, key: PageKey, content: Tensor) -> int | None:
        """Read the page into `content` (uint8 [num_bytes]); its CRC-32. None: a miss, with invalid `content`."""
        name = self._name(key.digest)
        last_use = self._last_use(name)
        try:
            checksum = read_page_file(self.directory / name, self.layout, key, content)
        except FileNotFoundError:
            self._forget(name, last_use)
            return None
        except BadPageFile as reason:
            logger.warning("disk tier: %s is a miss and deleted: %s", name, reason)
            self.num_damaged += 1
            self._delete(name)
            return None
        except OSError as error:
            if not self._warned_of_reading:
                logger.warning("disk tier: reading %s: %s (a miss; logged once)", name, error)
            self._warned_of_reading = True
            return None
        self._touch(name)
        return checksum

    def write(self, key: PageKey, content: Tensor, checksum: int) -> bool:
        """Write the page unless it exists. Returns whether it is on disk."""
        if not self.is_writable:
            return False
        if key in self:
            self._touch(self._name(key.digest))
            return True
        self._refresh(self._file_bytes)
        if not self._reserve(self._file_bytes):
            return False
        name, stamp = self._name(key.digest), self._stamp()
        try:
            self._write(name, key, content, checksum, stamp)
            is_written = True
        except OSError as error:
            self._stop_writing(error)
            is_written = False
        with self._lock:
            self._reserved -= self._file_bytes
            if is_written:
                self._folder.used(name, self._file_bytes, stamp)
        return is_written

    def clear(self) -> None:
        """Delete the pages of this layout, including other processes'."""
        with self._making_room:
            for number in range(256):
                where = f"{self._fingerprint}/{number:02x}"
                listing = self._folder.listing(where)
                with self._lock:
                    self._folder.merge(listing)
                for name in listing.files:
                    if not self._delete(name):
                        return

    def _write(self, name: str, key: PageKey, content: Tensor, checksum: int, stamp: int) -> None:
        path = self.directory / name
        # Two threads may write the same page: the names of unfinished files differ.
        writer = f"{self._writer}{next(self._num_writes):x}"
        for attempt in range(2):
            try:
                write_page_file(path, self.layout, key, content, checksum, writer=writer, stamp_ns=stamp)
                return
            except FileNotFoundError:
                # The subfolder is new, or another process has emptied the directory.
                if attempt:
                    raise
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _reserve(self, size: int) -> bool:
        """Delete files until `size` more bytes fit, and reserve them; the caller releases them. False if impossible."""
        with self._making_room:
            while True:
                with self._lock:
                    if self._folder.num_bytes + self._reserved + size <= self.capacity_bytes:
                        self._reserved += size
                        return True
                    oldest = self._folder.oldest()
                if oldest is None or not self._delete(oldest):
                    return False
                self.num_evicted += 1

    def _refresh(self, num_bytes: int) -> None:
        """Scan a part of the folder, in proportion to `num_bytes` written, for changes by other processes."""
        with self._making_room:
            with self._lock:
                due = self._folder.due(num_bytes * ROUNDS_PER_CAPACITY / self.capacity_bytes)
            for where in due:
                listing = self._folder.listing(where)
                with self._lock:
                    missing = self._folder.missing(listing)
                    self._folder.merge(listing)
                for name, last_use in missing.items():
                    if not os.path.lexists(self.directory / name):
                        self._forget(name, last_use)

    def _touch(self, name: str) -> None:
        """Record the use in memory, and in the file's mtime for other processes and restarts."""
        stamp = self._stamp()
        with self._lock:
            if name in self._folder:  # not if it was deleted meanwhile
                self._folder.used(name, self._file_bytes, stamp)
        try:
            os.utime(self.directory / name, ns=(stamp, stamp), follow_symlinks=False)
        except FileNotFoundError:
            self._forget(name, stamp)
        except OSError:
            # No permission: the order of last use is then slightly wrong for other processes.
            return

    def _delete(self, name: str) -> bool:
        last_use = self._last_use(name)
        try:
            (self.directory / name).unlink(missing_ok=True)
        except OSError as error:
            self._stop_writing(error)
            return False
        self._forget(name, last_use)
        return True

    def _last_use(self, name: str) -> int | None:
        with self._lock:
            return self._folder.last_use(name)

    def _forget(self, name: str, last_use: int | None) -> None:
        with self._lock:
            is_gone = self._folder.forget(name, last_use)
        fingerprint, _, rest = name.partition("/")
        if is_gone and fingerprint == self._fingerprint:
            self.dropped.append(bytes.fromhex(rest.rpartition("/")[2].removesuffix(".page")))

    def _stop_writing(self, error: OSError) -> None:
        with self._lock:
            was_writable, self.is_writable = self.is_writable, False
        if was_writable:
            logger.warning("disk tier: %s; no more pages are written to %s, reading goes on", error, self.directory)

    def _name(self, digest: bytes) -> str:
        return f"{self._fingerprint}/{digest[:1].hex()}/{digest.hex()}.page"

    def _stamp(self) -> int:
        """The current time in nanoseconds, strictly increasing."""
        with self._lock:
            self._last_stamp = max(time.time_ns(), self._last_stamp + 1)
            return self._last_stamp
