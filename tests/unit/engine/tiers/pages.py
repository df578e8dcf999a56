"""Small pages with known content, and a device whose copies a test can hold up."""

import random
import threading

import torch
from torch import Tensor

from glm5.engine.tiers.key import PageKey, page_key
from glm5.engine.tiers.layout import PageLayout
from glm5.engine.tiers.pagefile import checksum_of

PAGE_SIZE = 4
LAYOUT = PageLayout.of(PAGE_SIZE, {"latent.0": 192, "index_key.0": 64, "latent.1": 192}, {"weights": "a"})
OTHER_LAYOUT = PageLayout.of(PAGE_SIZE, {"latent.0": 192, "index_key.0": 64, "latent.1": 192}, {"weights": "b"})
# Nothing here takes a second; a wait that long is a hang.
PATIENCE_S = 30.0


def key_of(number: int, salt: bytes = b"") -> PageKey:
    return page_key(None, [number, 1, 2, 3], salt)


def content_of(number: int, layout: PageLayout = LAYOUT) -> Tensor:
    """Bytes that only page `number` has."""
    return torch.frombuffer(bytearray(random.Random(number).randbytes(layout.num_bytes)), dtype=torch.uint8)


def empty(layout: PageLayout = LAYOUT) -> Tensor:
    return torch.zeros(layout.num_bytes, dtype=torch.uint8)


def put(tier, number: int) -> bool:
    """Write page `number` to a disk tier."""
    content = content_of(number, tier.layout)
    return tier.write(key_of(number), content, checksum_of(content))


def has(tier, number: int) -> bool:
    """Whether a disk tier gives page `number` back; fails when it gives anything else."""
    got = empty(tier.layout)
    if tier.read(key_of(number), got) is None:
        return False
    assert torch.equal(got, content_of(number, tier.layout)), f"page {number} has a wrong content"
    return True


class Device:
    """Pages of a pretended device. While `gate` is closed, copies wait in the middle; `arrived` tells that one does."""

    def __init__(self, num_pages: int = 8):
        self.pages = torch.stack([content_of(1000 + i) for i in range(num_pages)])
        self.gate, self.arrived = threading.Event(), threading.Event()
        self.gate.set()
        self.num_reads = 0
        self.fails = False

    def fence(self) -> None:
        return None

    def read_page(self, page_id, block, fence) -> None:
        self._pass()
        self.num_reads += 1
        block.copy_(self.pages[page_id])

    def write_page(self, page_id, block, fence) -> None:
        self._pass()
        self.pages[page_id] = block

    def _pass(self) -> None:
        self.arrived.set()
        assert self.gate.wait(PATIENCE_S)
        if self.fails:
            raise ValueError("the device is gone")
