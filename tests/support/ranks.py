"""Ranks that are threads of one process, which exchange through a barrier."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from glm5.parallel.gloo import GlooGroup
from glm5.parallel.table import Shard

SECONDS = 30


class ThreadGroup(GlooGroup):
    def __init__(self, shard, said, barrier):
        super().__init__(shard)
        self.said, self.barrier = said, barrier

    def all_gather(self, part):
        self.said[self.shard.rank] = part
        self.barrier.wait(SECONDS)
        out = torch.stack(list(self.said))
        self.barrier.wait(SECONDS)
        return out


def by_threads(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What `work` returns on each of `size` ranks."""
    said, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadGroup(Shard(rank, size), said, barrier)), range(size)))
