"""Pages in host memory: blocks of one size, found by key and evicted least recently used first.

Life of a block:    claim (evicts when none is free) -> fill it -> publish -> lease, release, lease, release ...

A caller that claims or leases a block must release it; until then it is not evicted or reused. A block that is released
without having been published becomes free.
"""

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.engine.tiers.key import PageKey
from glm5.engine.tiers.layout import PageLayout

# torch rounds pinned allocations up to powers of two, so one large allocation could take twice its size.
PINNED_SEGMENT_BYTES = 1 << 28
MAX_DROPPED = 1 << 16
NO_KEY = PageKey(b"", b"")


@dataclass(eq=False)
class Block:
    """A page's bytes (`content`, uint8 [num_bytes]) with their CRC-32, which the holder sets before `publish`."""

    content: Tensor
    key: PageKey = NO_KEY
    checksum: int = 0
    leases: int = 0


class HostTier:
    """At most `capacity_bytes` of pages. `pin`: in page-locked memory, for a GPU. Thread-safe."""

    def __init__(self, capacity_bytes: int, layout: PageLayout, *, pin: bool = False):
        self.num_blocks = capacity_bytes // layout.num_bytes
        if self.num_blocks < 1:
            raise ConfigError(
                f"host tier: got {capacity_bytes} bytes, but one page takes {layout.num_bytes}; give more or none"
            )
        self.layout = layout
        self.num_evicted = 0
        # Digests of dropped pages, until the queue reads them; bounded, the oldest are lost first.
        self.dropped: deque[bytes] = deque(maxlen=MAX_DROPPED)
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, Block] = OrderedDict()
        self._free = [Block(row) for segment in self._segments(pin) for row in segment]

    def _segments(self, pin: bool) -> list[Tensor]:
        size = self.layout.num_bytes
        rows = max(1, PINNED_SEGMENT_BYTES // size) if pin else self.num_blocks
        counts = [min(rows, self.num_blocks - start) for start in range(0, self.num_blocks, rows)]
        return [torch.empty(count, size, dtype=torch.uint8, pin_memory=pin) for count in counts]

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: PageKey) -> bool:
        with self._lock:
            block = self._held.get(key.digest)
            return block is not None and block.key == key

    def holds(self, digest: bytes) -> bool:
        return digest in self._held

    @property
    def num_leased(self) -> int:
        """Blocks currently claimed or leased."""
        with self._lock:
            held = len(self._held) - sum(block.leases > 0 for block in self._held.values())
            return self.num_blocks - len(self._free) - held

    def claim(self, key: PageKey) -> Block | None:
        """A block to fill for `key`, which no other caller can find yet. None if all are leased."""
        with self._lock:
            block = self._free.pop() if self._free else self._evict()
            if block is not None:
                block.key, block.leases = key, 1
            return block

    def publish(self, block: Block) -> None:
        """Make the block available under its key, unless another one is already."""
        with self._lock:
            self._held.setdefault(block.key.digest, block)

    def lease(self, key: PageKey) -> Block | None:
        """The published block of `key`, now the most recently used, or None."""
        with self._lock:
            block = self._held.get(key.digest)
            if block is None or block.key != key:
                return None
            self._held.move_to_end(key.digest)
            block.leases += 1
            return block

    def release(self, block: Block) -> None:
        with self._lock:
            assert block.leases > 0, f"{block.leases=}"
            block.leases -= 1
            if not block.leases and self._held.get(block.key.digest) is not block:
                self._free.append(block)

    def drop(self, block: Block) -> None:
        """Remove the key of a leased block whose content is damaged. The block is free after its release."""
        with self._lock:
            self._forget(block)

    def clear(self) -> None:
        """Drop every page; the memory stays allocated."""
        with self._lock:
            for block in list(self._held.values()):
                self._forget(block)
                if not block.leases:
                    self._free.append(block)

    def _evict(self) -> Block | None:
        oldest = next((block for block in self._held.values() if not block.leases), None)
        if oldest is not None:
            self._forget(oldest)
            self.num_evicted += 1
        return oldest

    def _forget(self, block: Block) -> None:
        if self._held.get(block.key.digest) is block:
            del self._held[block.key.digest]
            self.dropped.append(block.key.digest)
