"""Pages that the first rank loaded from its tiers, on their way to ranks that share the model.

Keys are the same on every rank, so one of them keeps pages for all. Plans name what is loaded where, and messages what
has been: both are the same everywhere, so every rank knows which pages to exchange before which launch.
"""

from collections.abc import Sequence

import torch

from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.scheduler.messages import CopyDone, Message
from glm5.engine.scheduler.plan import StepPlan
from glm5.parallel.group import Group


class LoadedPages:
    """Of the cache of one rank of `group`."""

    def __init__(self, cache: KVCache, group: Group):
        self.cache, self.group = cache, group
        self._page_of: dict[int, int] = {}

    def expect(self, plan: StepPlan) -> None:
        """Note what a plan loads, once it is launched: what it does with its pages comes first."""
        self._page_of |= {copy_id: page for copy_id, _, page in plan.loads}

    @torch.inference_mode()
    def share(self, messages: Sequence[Message]) -> None:
        """Make pages whose loads have ended, as `messages` say, those of the first rank. Before the next launch."""
        for message in messages:
            if isinstance(message, CopyDone):
                page = self._page_of.pop(message.copy_id, None)
                if page is not None and message.tier is not None:
                    self.group.broadcast(self.cache.page(page))
