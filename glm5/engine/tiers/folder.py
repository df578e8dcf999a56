"""An index of a folder's page files: their total size and last use. Several processes may share the folder.

    FOLDER / fingerprint (32 hex) / first 2 of the key / key (32 hex).page      mtime = last use

Every process has its own index and updates it subfolder by subfolder, since others write and delete there too. Files
of every fingerprint count, so pages of old weights are evicted first. Files with other names are ignored.
"""

import heapq
import os
import re
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

FINGERPRINT, SHARD = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{2}")
PAGE, PART = re.compile(r"[0-9a-f]{32}\.page"), re.compile(r"\.[0-9a-f]{32}\.page\.[0-9a-f]+\.part")
# An unfinished file that is older than this belongs to a process that died.
PART_LIFETIME_NS = 600 * 10**9


@dataclass
class _File:
    size: int
    used_ns: int


@dataclass
class _Shard:
    """Files of one subfolder. `parts`: bytes of files that other processes are writing."""

    files: dict[str, _File] = field(default_factory=dict)
    parts: int = 0


@dataclass
class Listing:
    """The same, as one scan of the subfolder `where` found it."""

    where: str
    files: dict[str, _File] = field(default_factory=dict)
    parts: int = 0


class PageFolder:
    """The index of one folder. `writer`: prefix that marks this process's own unfinished files.

    Names are relative to the folder. Only `listing` may run concurrently with the other methods.
    """

    def __init__(self, root: Path, writer: str):
        self.root, self.writer = root, writer
        self.num_bytes = 0
        self._shards: dict[str, _Shard] = {}
        # A heap of (last use, name), with outdated entries, which are skipped when they reach the top.
        self._ages: list[tuple[int, str]] = []
        # Subfolders not yet scanned in the current round.
        self._due: deque[str] = deque()

    def __contains__(self, name: str) -> bool:
        return name in self._files(name)

    def __len__(self) -> int:
        return sum(len(shard.files) for shard in self._shards.values())

    def used(self, name: str, size: int, used_ns: int) -> None:
        """Record that the file exists and was used at that time."""
        files = self._files(name)
        if name in files:
            self.num_bytes -= files[name].size
            used_ns = max(used_ns, files[name].used_ns)
        files[name] = _File(size, used_ns)
        self.num_bytes += size
        heapq.heappush(self._ages, (used_ns, name))
        if len(self._ages) > 2 * len(self) + 1024:
            self._ages = [(file.used_ns, name) for shard in self._shards.values() for name, file in shard.files.items()]
            heapq.heapify(self._ages)

    def last_use(self, name: str) -> int | None:
        """The file's last known use; None if it is not in the index."""
        file = self._files(name).get(name)
        return None if file is None else file.used_ns

    def forget(self, name: str, last_use: int | None) -> bool:
        """Remove a deleted file from the index, unless it was used since `last_use`, so that it was written again."""
        file = self._files(name).get(name)
        if file is None or file.used_ns != last_use:
            return False
        self.num_bytes -= self._files(name).pop(name).size
        return True

    def oldest(self) -> str | None:
        """The least recently used file; it stays in the index until `forget`."""
        while self._ages:
            used_ns, name = self._ages[0]
            if self.last_use(name) == used_ns:
                return name
            heapq.heappop(self._ages)
        return None

    def scan(self) -> None:
        """Index the complete folder. Raises OSError if it cannot be listed."""
        os.listdir(self.root)
        for where in self._all_shards():
            self.merge(self.listing(where))

    def due(self, share: float) -> list[str]:
        """The next subfolders to scan again: at least one, and at least this share of all."""
        if not self._due:
            self._due = self._all_shards()
        count = min(len(self._due), 1 + int(share * len(self._shards)))
        return [self._due.popleft() for _ in range(count)]

    def missing(self, listing: Listing) -> dict[str, int]:
        """Indexed files that the listing lacks, and their last use. They were deleted, or written after it began."""
        files = self._shard(listing.where).files
        return {name: file.used_ns for name, file in files.items() if name not in listing.files}

    def merge(self, listing: Listing) -> None:
        """Add the listing to the index."""
        shard = self._shard(listing.where)
        self.num_bytes += listing.parts - shard.parts
        shard.parts = listing.parts
        for name, file in listing.files.items():
            if shard.files.get(name) != file:
                self.used(name, file.size, file.used_ns)

    def _shard(self, where: str) -> _Shard:
        return self._shards.setdefault(where, _Shard())

    def _files(self, name: str) -> dict[str, _File]:
        return self._shard(name.rpartition("/")[0]).files

    def _all_shards(self) -> deque[str]:
        found = {
            f"{fingerprint}/{shard}"
            for fingerprint in _folders(self.root, FINGERPRINT)
            for shard in _folders(self.root / fingerprint, SHARD)
        }
        return deque(sorted(found | self._shards.keys()))

    def listing(self, where: str) -> Listing:
        """List a subfolder on disk. Deletes unfinished files of dead processes."""
        found = Listing(where)
        # Another process may delete the subfolder, or a file, meanwhile. The listing is then incomplete; the caller
        # checks missing files by name.
        with suppress(OSError), os.scandir(self.root / where) as entries:
            for entry in entries:
                is_page, is_part = PAGE.fullmatch(entry.name), PART.fullmatch(entry.name)
                if not (is_page or is_part) or not entry.is_file(follow_symlinks=False):
                    continue
                status = entry.stat(follow_symlinks=False)
                if is_page:
                    found.files[f"{where}/{entry.name}"] = _File(status.st_size, status.st_mtime_ns)
                elif time.time_ns() - status.st_mtime_ns > PART_LIFETIME_NS:
                    os.unlink(entry.path)
                elif not entry.name.split(".")[3].startswith(self.writer):
                    found.parts += status.st_size
        return found


def _folders(parent: Path, form: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(parent) as entries:
            return [
                entry.name for entry in entries if form.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
