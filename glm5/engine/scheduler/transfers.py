"""Copies of pages to and from the lower tiers: queued, under way, and which pages the tiers have.

A full page is stored once, soon after it enters the prefix tree, so it can later be evicted without a copy. A copy
under way holds a reference to its page. The number of concurrent copies is bounded; further stores wait, and are
skipped if their page is evicted first.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from glm5.engine.cache.pages import PagePool
from glm5.engine.cache.prefix import Node, PrefixTree
from glm5.engine.scheduler.messages import Tier
from glm5.engine.scheduler.plan import StepPlan, TierCopy
from glm5.engine.scheduler.sequence import Restore
from glm5.engine.tiers.key import PageKey


@dataclass
class _Load:
    restore: Restore
    index: int
    digest: bytes
    page: int


@dataclass
class _Store:
    node: Node
    digest: bytes
    page: int
    era: int


class Transfers:
    """Adds copies to plans and handles their ends. `tier_of`: tier of each page that can be loaded, by digest."""

    def __init__(self, pool: PagePool, tree: PrefixTree, *, max_loads: int, max_stores: int):
        self.pool, self.tree, self.max_loads, self.max_stores = pool, tree, max_loads, max_stores
        self.tier_of: dict[bytes, Tier] = {}
        self._next_id = self._era = 0
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._restores: deque[Restore] = deque()
        self._to_store: deque[Node] = deque()
        self._cancelled: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether copies are under way, queued or to be cancelled."""
        return bool(self._loads or self._stores or self._to_store or self._restores or self._cancelled)

    @property
    def num_in_flight(self) -> int:
        return len(self._loads) + len(self._stores)

    def restore(self, pages: list[tuple[int, PageKey, int]], num_held: int, *, is_again: bool) -> Restore:
        """Queue loads of (number in the sequence, key, page); the `num_held` pages before them are valid already."""
        tiers: list[Tier] = [self.tier_of[key.digest] for _, key, _ in pages]
        restore = Restore(deque(pages), num_held + len(pages), num_held, tiers, is_again)
        self._restores.append(restore)
        return restore

    def cancel(self, restore: Restore) -> None:
        """The sequence no longer waits for these pages. Loads under way keep theirs until they end."""
        restore.pending.clear()
        self._cancelled += restore.copy_ids

    def store(self, node: Node) -> None:
        """Queue a store of the page of `node`."""
        if len(self._to_store) >= 2 * self.pool.num_pages:
            # Stores lag behind: most of these pages have been evicted.
            self._to_store = deque(waiting for waiting in self._to_store if waiting.is_kept)
        self._to_store.append(node)

    def issue(self, plan: StepPlan) -> None:
        """Add queued copies to `plan`, up to the limits."""
        while self._restores and len(self._loads) < self.max_loads:
            restore = self._restores[0]
            if not restore.pending:
                self._restores.popleft()
                continue
            index, key, page = restore.pending.popleft()
            self._loads[self._next_id] = _Load(restore, index, key.digest, page)
            restore.num_in_flight += 1
            restore.copy_ids.append(self._next_id)
            plan.loads.append(self._copy(key, page))
        while self._to_store and len(self._stores) < self.max_stores:
            node = self._to_store.popleft()
            if not node.is_kept:
                continue
            key = self.tree.key_of(node)
            tier = self.tier_of.get(key.digest)
            if tier is None:
                self._stores[self._next_id] = _Store(node, key.digest, node.page, self._era)
                plan.stores.append(self._copy(key, node.page))
            else:
                self._note(node, tier)
        plan.cancelled, self._cancelled = self._cancelled, []

    def end(self, copy_id: int, tier: Tier | None) -> None:
        """A copy has ended. After a failed load, its restore keeps only the pages before it."""
        if (load := self._loads.pop(copy_id, None)) is not None:
            self.pool.unref(load.page)
            restore = load.restore
            restore.num_in_flight -= 1
            restore.copy_ids.remove(copy_id)
            if tier is None:
                self._set_tier(load.digest, None)
                restore.num_good = min(restore.num_good, load.index)
                restore.pending.clear()
            return
        store = self._stores.pop(copy_id)
        self.pool.unref(store.page)
        if tier is not None:
            self._set_tier(store.digest, tier)
            if store.era == self._era:
                self._note(store.node, tier)

    def update(self, pages: Iterable[tuple[bytes, Tier | None]], prompt_ids: Sequence[int]) -> None:
        """Record pages that the tiers have, or have evicted. `prompt_ids`: see `TierChange`."""
        parent, size = None, self.tree.page_size
        for number, (digest, tier) in enumerate(pages):
            self._set_tier(digest, tier)
            if self.tree.changes is not None and prompt_ids and tier is not None:
                self.tree.changes.in_tier(tier, digest, parent, prompt_ids[number * size : (number + 1) * size])
            parent = digest

    def forget_all(self) -> None:
        """Tell subscribers that no page is valid any more, those of stores under way included."""
        self._era += 1
        if self.tree.changes is not None:
            self.tree.changes.cleared()

    def _set_tier(self, digest: bytes, tier: Tier | None) -> None:
        if tier is None:
            self.tier_of.pop(digest, None)
        else:
            self.tier_of[digest] = tier
        if self.tree.changes is not None:
            self.tree.changes.moved(digest, tier)

    def _note(self, node: Node, tier: Tier) -> None:
        """Tell subscribers that a lower tier has the page of `node`."""
        if self.tree.changes is not None:
            digest, parent = self.tree.key_of(node).digest, self.tree.parent_digest(node)
            self.tree.changes.in_tier(tier, digest, parent, node.tokens)

    def _copy(self, key: PageKey, page: int) -> TierCopy:
        self.pool.ref(page)
        copy = TierCopy(self._next_id, key, page)
        self._next_id += 1
        return copy
