"""A router's view of an engine's cache, rebuilt from events alone, and a comparison with the engine's own."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from glm5.engine.cache.changes import Change
from glm5.engine.scheduler.page_manager import PageManager
from glm5.engine.transport.kv_events import MEDIUM, block_hash, events_of


@dataclass
class RouterView:
    """`blocks`: by medium, (parent, token ids) of each block by its hash. Events as decoded from MessagePack."""

    page_size: int
    blocks: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = field(
        default_factory=lambda: {medium: {} for medium in MEDIUM.values()}
    )
    num_events: int = 0

    def read(self, changes: list[Change]) -> None:
        """What a subscriber is sent of these changes."""
        for event in msgspec.msgpack.decode(msgspec.msgpack.encode(events_of(changes, self.page_size))):
            self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        """AssertionError for an event that a router could not make sense of."""
        self.num_events += 1
        match event["type"]:
            case "AllBlocksCleared":
                for blocks in self.blocks.values():
                    blocks.clear()
            case "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.blocks[event["medium"]][name]
            case "BlockStored":
                self._store(event)
            case other:
                raise AssertionError(other)

    def _store(self, event: dict[str, Any]) -> None:
        size, parent, blocks = self.page_size, event["parent_block_hash"], self.blocks[event["medium"]]
        names, tokens = event["block_hashes"], event["token_ids"]
        assert len(tokens) == size * len(names)
        assert event["block_size"] == size
        assert event["lora_id"] is None
        if event["medium"] == "GPU":
            assert parent is None or parent in blocks, "a page is reusable only after those before it"
        for number, name in enumerate(names):
            assert name not in blocks, "a block is stored twice"
            blocks[name] = parent, tuple(tokens[number * size : (number + 1) * size])
            parent = name

    def check(self, pages: PageManager) -> None:
        """The view is that of the prefix tree's full pages outside of sessions, and holds nothing of the lower tiers
        that is not there."""
        tree = pages.tree
        real = {}
        for node in tree.nodes():
            parent = node.parent
            assert parent is not None
            if len(node.tokens) < tree.page_size or node.versions:
                continue
            above = block_hash(tree.key_of(parent).digest) if parent.tokens else None
            real[block_hash(tree.key_of(node).digest)] = above, node.tokens
        assert self.blocks["GPU"] == real
        for tier in ("host", "disk"):
            there = {block_hash(digest) for digest, place in pages.transfers.tier_of.items() if place == tier}
            assert self.blocks[MEDIUM[tier]].keys() <= there, tier

    def check_tiers(self, pages: PageManager) -> None:
        """Everything in the lower tiers is in the view."""
        for tier in ("host", "disk"):
            there = {block_hash(digest) for digest, place in pages.transfers.tier_of.items() if place == tier}
            assert self.blocks[MEDIUM[tier]].keys() == there, tier
