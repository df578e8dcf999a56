"""Which page files a folder holds: how much they take, and which was not used for longest. Several may share it.

    FOLDER / fingerprint (32 hex) / first 2 of the key / key (32 hex).page      mtime = last use

Every process keeps its own idea of the folder and brings it up to date subfolder by subfolder, since others write and
delete there too. Files of every fingerprint count: pages of yesterday's weights are the first to be evicted.
Names of any other form are nobody's business here and are never touched.
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
# A file that has been under way for so long belongs to a process that died.
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
    """The same as one look at the subfolder `where` found it."""

    where: str
    files: dict[str, _File] = field(default_factory=dict)
    parts: int = 0


class PageFolder:
    """Bookkeeping of one folder; `writer` begins the marks of unfinished files that are this process's own.

    Names are relative to the folder. Only `listing` may run beside the other methods.
    """

    def __init__(self, root: Path, writer: str):
        self.root, self.writer = root, writer
        self.num_bytes = 0
        self._shards: dict[str, _Shard] = {}
        # (last use, name), with entries that a later use has overtaken: they are skipped when they surface.
        self._ages: list[tuple[int, str]] = []
        # Subfolders that were not looked at since the last round began.
        self._due: deque[str] = deque()

    def __contains__(self, name: str) -> bool:
        return name in self._files(name)

    def __len__(self) -> int:
        return sum(len(shard.files) for shard in self._shards.values())

    def used(self, name: str, size: int, used_ns: int) -> None:
        """The file is there and was used at that time."""
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
        """When the file was used, as far as known; None if there is none."""
        file = self._files(name).get(name)
        return None if file is None else file.used_ns

    def forget(self, name: str, last_use: int | None) -> bool:
        """The file that was last used then is gone; one that has taken its place meanwhile is not."""
        file = self._files(name).get(name)
        if file is None or file.used_ns != last_use:
            return False
        self.num_bytes -= self._files(name).pop(name).size
        return True

    def oldest(self) -> str | None:
        """The file not used for longest; it stays until it is forgotten."""
        while self._ages:
            used_ns, name = self._ages[0]
            if self.last_use(name) == used_ns:
                return name
            heapq.heappop(self._ages)
        return None

    def scan(self) -> None:
        """Take in the whole folder. Raises OSError when it cannot be listed."""
        os.listdir(self.root)
        for where in self._all_shards():
            self.merge(self.listing(where))

    def due(self, share: float) -> list[str]:
        """The subfolders to look at again now, in turn: at least one, at least this share of all."""
        if not self._due:
            self._due = self._all_shards()
        count = min(len(self._due), 1 + int(share * len(self._shards)))
        return [self._due.popleft() for _ in range(count)]

    def missing(self, listing: Listing) -> dict[str, int]:
        """Files that the listing should have shown, and their last use. Gone, or come after it began: look by name."""
        files = self._shard(listing.where).files
        return {name: file.used_ns for name, file in files.items() if name not in listing.files}

    def merge(self, listing: Listing) -> None:
        """Take in what the listing shows."""
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
        """What lies in a subfolder now, asked of the file system alone. Sweeps unfinished files of dead processes."""
        found = Listing(where)
        # Somebody may delete the subfolder, or a file, under our eyes. What was seen until then is true, and the rest
        # is asked for by name.
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
