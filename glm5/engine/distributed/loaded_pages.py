"""Broadcasts pages that the first rank loaded from its tiers to the other ranks.

The KV cache is the same on every rank, so the first rank stores and loads pages for all. Plans list the loads that
begin, messages those that ended. Both are the same on every rank, so all know which pages to broadcast before a launch.
"""

from collections.abc import Sequence

import torch

from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.scheduler.messages import CopyDone, Message
from glm5.engine.scheduler.plan import StepPlan
from glm5.parallel.group import Group


class LoadedPages:
    """The loaded pages of one rank's cache. `group`: all ranks."""

    def __init__(self, cache: KVCache, group: Group):
        self.cache, self.group = cache, group
        self._page_of: dict[int, int] = {}

    def expect(self, plan: StepPlan) -> None:
        """Record the loads of a plan. Call it after the launch, since the plan's own page copies come first."""
        self._page_of |= {copy_id: page for copy_id, _, page in plan.loads}

    @torch.inference_mode()
    def share(self, messages: Sequence[Message]) -> None:
        """Broadcast the pages whose loads have ended, according to `messages`. Call it before the next launch."""
        for message in messages:
            if isinstance(message, CopyDone):
                page = self._page_of.pop(message.copy_id, None)
                if page is not None and message.tier is not None:
                    self.group.broadcast(self.cache.page(page))
