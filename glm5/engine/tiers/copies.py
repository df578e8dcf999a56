"""Copies between device, host and disk in worker threads, so that a step never waits for memory or disk.

    store   page -> block in host memory (now reported as done)  -> file, later
    load    block in host memory, or file -> such a block -> page (now reported as done)

A page passed to `store` or `load` belongs to the queue until `done` reports the copy; each is reported once. A load of
a missing or damaged page is reported as not ok: its tokens must be computed. A disk that hangs or lags costs stores
and loads, never a step: files that cannot be written in time are skipped, and `cancel` frees a page while its file is
still being read.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Literal, Self

from glm5.common.errors import ConfigError
from glm5.engine.tiers.disk import DiskTier
from glm5.engine.tiers.host import Block, HostTier
from glm5.engine.tiers.key import PageKey
from glm5.engine.tiers.pagefile import checksum_of
from glm5.engine.tiers.pageio import PageIO

logger = logging.getLogger(__name__)

Tier = Literal["host", "disk"]
# The most blocks of the host tier that may wait for their file: they must be flushed at exit.
MAX_WAITING_WRITES = 256
# How long `clear` waits for files being written; a disk that hangs longer may write some after it.
CLEAR_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Copied:
    """A copy that has ended. `tier`: where the page was loaded from or stored; None if not ok."""

    handle: int
    kind: Literal["store", "load"]
    key: PageKey
    page_id: int
    tier: Tier | None

    @property
    def ok(self) -> bool:
        return self.tier is not None


@dataclass
class CopyCounts:
    """Counts of pages since the start. `refused`: queue or host tier was full; `damaged`: in host memory; `unwritten`:
    stored in host memory, but not written to a file."""

    stored: int = 0
    loaded_from_host: int = 0
    loaded_from_disk: int = 0
    missed: int = 0
    cancelled: int = 0
    refused: int = 0
    damaged: int = 0
    unwritten: int = 0


@dataclass(eq=False)
class _Copy:
    handle: int
    kind: Literal["store", "load"]
    key: PageKey
    page_id: int
    fence: object
    on_page: bool = False


class CopyQueue:
    """Copies pages between `io` and the tiers. Only one thread may call its methods, except for `lookup` and `clear`,
    which may wait for the disk and are thread-safe.

    At most `max_in_flight` copies hold pages at a time. An exception of `io` is raised by the next `done`.
    """

    def __init__(
        self,
        io: PageIO,
        host: HostTier,
        disk: DiskTier | None = None,
        *,
        num_workers: int = 2,
        max_in_flight: int = 64,
    ):
        if host.num_blocks <= num_workers:
            raise ConfigError(
                f"host tier: got room for {host.num_blocks} pages, but {num_workers} copying threads need one each and "
                f"one more; give at least {(num_workers + 1) * host.layout.num_bytes} bytes"
            )
        self.host, self.disk, self.max_in_flight = host, disk, max_in_flight
        self.counts = CopyCounts()
        self._io = io
        self._max_writes = min(MAX_WAITING_WRITES, host.num_blocks - num_workers)
        # One worker is reserved for copies, if there are at least two.
        self._max_writers = max(1, num_workers - 1)
        # Guards everything below; notified of every change.
        self._changed = threading.Condition()
        self._copies: dict[int, _Copy] = {}
        self._loads: deque[_Copy] = deque()
        self._stores: deque[_Copy] = deque()
        self._writes: deque[Block] = deque()
        self._num_busy = self._num_writing = self._last_handle = 0
        self._done: list[Copied] = []
        self._error: Exception | None = None
        self._closing = False
        # Daemons: a thread that hangs in a dead file system must not block the exit of the process.
        self._workers = [
            threading.Thread(target=self._work, name=f"glm5-tiers-{i}", daemon=True) for i in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def store(self, key: PageKey, page_id: int) -> int | None:
        """Store the page's content as of all work launched so far. None: too many copies are in flight."""
        return self._submit("store", key, page_id, self._stores)

    def load(self, key: PageKey, page_id: int) -> int | None:
        """Load the content into the page, after all work launched so far. None: too many copies are in flight."""
        return self._submit("load", key, page_id, self._loads)

    def cancel(self, handle: int) -> None:
        """Cancel a copy. It is reported at once, unless its page is currently being copied, or the copy has ended."""
        with self._changed:
            copy = self._copies.get(handle)
            if copy is not None:
                self._cancel(copy)

    def done(self, timeout_s: float = 0.0) -> list[Copied]:
        """Copies that ended since the last call; waits until there is one, at most `timeout_s`."""
        with self._changed:
            if timeout_s:
                self._changed.wait_for(lambda: self._done or self._error, timeout_s)
            if self._error is not None:
                raise RuntimeError(f"copying a page failed: {self._error!r}") from self._error
            ended, self._done = self._done, []
            return ended

    def lookup(self, keys: Iterable[PageKey]) -> list[Tier]:
        """The tiers of the pages of a chain of keys, up to the first missing page."""
        found: list[Tier] = []
        for key in keys:
            if key in self.host:
                found.append("host")
            elif self.disk is not None and key in self.disk:
                found.append("disk")
            else:
                break
        return found

    def clear(self) -> None:
        """Drop all pages that are not being copied; delete files of this layout, including other processes'."""
        with self._changed:
            self._drop_writes()
            self._changed.wait_for(lambda: not self._num_writing, CLEAR_TIMEOUT_S)
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def moved(self) -> list[tuple[bytes, Tier | None]]:
        """Digests of pages that left a tier since the last call, and the tier that still has each, or None."""
        queues = [self.host.dropped] + ([self.disk.dropped] if self.disk is not None else [])
        digests = [queue.popleft() for queue in queues for _ in range(len(queue))]
        return [(digest, self._where(digest)) for digest in dict.fromkeys(digests)]

    def stats(self) -> dict[str, int]:
        """Counters and sizes for the metrics."""
        stats = asdict(self.counts) | {
            "in_flight": len(self._copies),
            "host_leased": self.host.num_leased,
            "host_pages": len(self.host),
            "host_capacity_pages": self.host.num_blocks,
            "host_evicted": self.host.num_evicted,
        }
        if self.disk is not None:
            stats |= {
                "disk_files": len(self.disk),
                "disk_bytes": self.disk.num_bytes,
                "disk_evicted": self.disk.num_evicted,
                "disk_damaged": self.disk.num_damaged,
                "disk_is_writable": int(self.disk.is_writable),
            }
        return stats

    def flush(self, timeout_s: float) -> bool:
        """Wait for all copies and files, at most `timeout_s`. False if some are still under way then."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel copies that have not begun and end the threads. Call `flush` first to write waiting files."""
        with self._changed:
            for copy in list(self._copies.values()):
                self._cancel(copy)
            self._drop_writes()
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        if hanging := [worker.name for worker in self._workers if worker.is_alive()]:
            logger.warning("tiers: %s still wait for memory or disk after %s s; left behind", hanging, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, kind: Literal["store", "load"], key: PageKey, page_id: int, queue: deque[_Copy]) -> int | None:
        assert not self._closing, "the queue is closed"
        with self._changed:
            if len(self._copies) >= self.max_in_flight:
                self.counts.refused += 1
                return None
            self._last_handle += 1
            copy = _Copy(self._last_handle, kind, key, page_id, self._io.fence())
            self._copies[copy.handle] = copy
            queue.append(copy)
            self._changed.notify_all()
            return copy.handle

    def _cancel(self, copy: _Copy) -> None:
        if copy.on_page:
            return
        for queue in (self._loads, self._stores):
            if copy in queue:
                queue.remove(copy)
        self.counts.cancelled += 1
        self._report(copy, None)

    def _where(self, digest: bytes) -> Tier | None:
        if self.host.holds(digest):
            return "host"
        return "disk" if self.disk is not None and self.disk.holds(digest) else None

    def _is_idle(self) -> bool:
        return not (self._copies or self._writes or self._num_busy)

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001  (`done` raises it in the engine's thread)
                with self._changed:
                    self._error = self._error or error
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        """The next job: loads, on which requests wait, before stores, which free pages, before files. None: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._loads or self._stores or self._may_write())
            if self._loads:
                job = partial(self._load, self._loads.popleft())
            elif self._stores:
                job = partial(self._store, self._stores.popleft())
            elif self._may_write():
                self._num_writing += 1
                job = partial(self._write, self._writes.popleft())
            else:
                return None
            self._num_busy += 1
            return job

    def _may_write(self) -> bool:
        return bool(self._writes) and self._num_writing < self._max_writers

    def _load(self, copy: _Copy) -> None:
        tier: Tier | None = None
        try:
            block, found = self._find(copy)
            if block is None:
                return
            try:
                if self._begin(copy):
                    self._io.write_page(copy.page_id, block.content, copy.fence)
                    tier = found
            finally:
                self.host.release(block)
        finally:
            self._end(copy, tier)

    def _store(self, copy: _Copy) -> None:
        if not self._is_wanted(copy):
            return
        tier: Tier | None = None
        block = self.host.lease(copy.key)
        try:
            if block is not None:
                tier = "host"
            elif (block := self.host.claim(copy.key)) is not None and self._begin(copy):
                self._io.read_page(copy.page_id, block.content, copy.fence)
                block.checksum = checksum_of(block.content)
                self.host.publish(block)
                tier = "host"
        finally:
            self._end(copy, tier)
            if block is not None and not (tier and self._write_later(block)):
                self.host.release(block)

    def _write(self, block: Block) -> None:
        assert self.disk is not None
        is_written = False
        try:
            is_written = self.disk.write(block.key, block.content, block.checksum)
        finally:
            self.host.release(block)
            with self._changed:
                self._num_writing -= 1
                self.counts.unwritten += not is_written

    def _find(self, copy: _Copy) -> tuple[Block | None, Tier | None]:
        """A leased block with the page's content, verified, and the tier that had it."""
        if not self._is_wanted(copy):
            return None, None
        if (block := self.host.lease(copy.key)) is not None:
            if checksum_of(block.content) == block.checksum:
                return block, "host"
            logger.warning("host tier: page %s was damaged in memory; a miss", copy.key.digest.hex())
            with self._changed:
                self.counts.damaged += 1
            self.host.drop(block)
            self.host.release(block)
        if self.disk is None or copy.key not in self.disk:
            return None, None
        if (block := self.host.claim(copy.key)) is None:
            return None, None
        checksum = self.disk.read(copy.key, block.content)
        if checksum is None:
            self.host.release(block)
            return None, None
        block.checksum = checksum
        self.host.publish(block)
        return block, "disk"

    def _write_later(self, block: Block) -> bool:
        """Queue the leased block for writing; the writer releases it. False if it was not queued."""
        with self._changed:
            if self.disk is None:
                return False
            if self._closing or not self.disk.is_writable or len(self._writes) + self._num_writing >= self._max_writes:
                self.counts.unwritten += 1
                return False
            self._writes.append(block)
            self._changed.notify_all()
            return True

    def _drop_writes(self) -> None:
        while self._writes:
            self.host.release(self._writes.popleft())
            self.counts.unwritten += 1

    def _is_wanted(self, copy: _Copy) -> bool:
        with self._changed:
            return copy.handle in self._copies

    def _begin(self, copy: _Copy) -> bool:
        """Start to copy the page; from now on the copy cannot be cancelled. False: it was cancelled already."""
        with self._changed:
            copy.on_page = copy.handle in self._copies
            return copy.on_page

    def _end(self, copy: _Copy, tier: Tier | None) -> None:
        with self._changed:
            if copy.handle not in self._copies:
                return
            if copy.kind == "store":
                self.counts.stored += tier is not None
                self.counts.refused += tier is None
            elif tier is None:
                self.counts.missed += 1
            elif tier == "host":
                self.counts.loaded_from_host += 1
            else:
                self.counts.loaded_from_disk += 1
            self._report(copy, tier)

    def _report(self, copy: _Copy, tier: Tier | None) -> None:
        del self._copies[copy.handle]
        self._done.append(Copied(copy.handle, copy.kind, copy.key, copy.page_id, tier))
        self._changed.notify_all()
