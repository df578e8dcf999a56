"""Pages of sequences: prefix lookup and allocation at admission, growth, sharing of pages, release.

Steps are planned only for positions that have a page. A sequence is admitted with pages for all its known tokens, so a
prompt never runs out of pages. A decoding one grows step by step, to the furthest position that its drafts can reach.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from glm5.engine.cache.pages import PagePool
from glm5.engine.cache.prefix import Node, PrefixTree, Versions, cache_salt, session_salt
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import SetWeights, Tier, TierChange
from glm5.engine.scheduler.plan import PageCopy, StepPlan, TableEntry
from glm5.engine.scheduler.sequence import Restore, Sequence
from glm5.engine.scheduler.transfers import Transfers
from glm5.engine.tiers.key import PageKey


@dataclass
class Found:
    """What admission now would give a waiting sequence: a `donor` whose prompt it shares, `num_matched` full pages of
    the prefix tree, and after them pages to load (`lower`) or a copy of a `partial` one. It can be admitted if no pages
    are missing (`num_short`)."""

    donor: Sequence | None
    num_matched: int
    num_short: int
    lower: list[PageKey] = field(default_factory=list)
    partial: Node | None = None


class PageManager:
    """The page pool, the prefix tree and the transfers. `weights`: identity of the weights, part of every salt but
    those of sessions. `versions`: of the weights whose keys sessions may use, the current ones last."""

    def __init__(self, config: SchedulerConfig, weights: bytes, version: int):
        self.config, self.weights, self.versions = config, weights, [version]
        self.pool = PagePool(config.num_pages)
        self.tree = PrefixTree(self.pool, config.page_size)
        self.transfers = Transfers(self.pool, self.tree, max_loads=config.max_loads, max_stores=config.max_stores)
        # Page table entries changed since the last plan.
        self._changed: list[tuple[Sequence, int]] = []
        # Sequences with other `key_versions` since then.
        self._rekeyed: list[Sequence] = []

    def find(self, seq: Sequence, donor: Sequence | None, headroom: int) -> Found:
        """What `seq` could share, and how many pages it lacks if `headroom` pages are to stay available."""
        available = self.pool.num_available - headroom
        num_pages = self.config.pages_for(len(seq.tokens))
        if donor is not None:
            return Found(donor, 0, max(0, num_pages - self._num_shared(seq) - available))
        self._match(seq)
        # Matched idle pages would become used, so they are not available for the other tokens.
        available -= sum(self.pool.is_idle(node.page) for node in seq.path)
        num_new = num_pages - len(seq.path)
        found = Found(None, len(seq.path), max(0, num_new - available))
        if not found.num_short and self._may_hit(seq):
            if self.transfers.tier_of:
                found.lower = self._find_lower(seq)
            if not found.lower and num_new < available:  # the partial page stays until it is copied
                found.partial = self.tree.match_partial(seq.salt, seq.tokens, seq.path)
        return found

    def admit(self, seq: Sequence, found: Found, plan: StepPlan) -> None:
        """Give `seq` pages for all its tokens. Sets `computed`, and `restore` when pages are to be loaded first."""
        num_pages, had_versions = self.config.pages_for(len(seq.tokens)), bool(seq.key_versions)
        seq.key_versions = [version for node in seq.path for version in node.versions]
        if found.donor is not None:
            self._share_prompt(seq, found.donor, plan)
        else:
            seq.pages = [node.page for node in seq.path]
            for page in seq.pages:
                self.pool.ref(page)
            seq.node, seq.num_in_tree = (seq.path[-1] if seq.path else None), len(seq.path)
            seq.computed = seq.confirmed = len(seq.path) * self.config.page_size
            if found.partial is not None:
                self._copy_partial(seq, found.partial, plan)
            seq.pages += self._allocate(num_pages - len(seq.pages))
        seq.path = []
        seq.covered = num_pages * self.config.page_size
        if seq.key_versions or had_versions:
            self._rekeyed.append(seq)
        if found.lower:
            numbers = range(found.num_matched, found.num_matched + len(found.lower))
            loads = [(number, key, seq.pages[number]) for number, key in zip(numbers, found.lower, strict=True)]
            seq.restore = self.transfers.restore(loads, found.num_matched, is_again=seq.was_admitted)
        self._count(seq, found)

    def finish_restore(self, seq: Sequence) -> None:
        """All loads of `seq` have ended: its pages before the first failed one are valid."""
        restore, seq.restore = seq.restore, None
        assert restore is not None
        seq.computed = seq.confirmed = restore.num_good * self.config.page_size
        self._count_loaded(restore)
        self.share_full_pages(seq)

    def grow(self, seq: Sequence, num_positions: int) -> bool:
        """Allocate pages for `num_positions`; returns False, without any change, if they are not available."""
        first = len(seq.pages)
        need = self.config.pages_for(num_positions) - first
        if need > self.pool.num_available:
            return False
        seq.pages += self._allocate(need)
        seq.covered = len(seq.pages) * self.config.page_size
        self._changed += [(seq, index) for index in range(first, len(seq.pages))]
        return True

    def share_full_pages(self, seq: Sequence) -> None:
        """Insert full, confirmed pages into the tree; where it has an equal page already, use that one."""
        size = self.config.page_size
        if not (self.config.prefix_cache and seq.is_pure):
            return
        for index in range(seq.num_in_tree, seq.confirmed // size):
            page = seq.pages[index]
            num_nodes = len(self.tree)
            start, end = index * size, (index + 1) * size
            versions = self._versions(seq, start, end)
            node = self.tree.extend(seq.salt, seq.node, seq.tokens[start:end], page, versions)
            if node.versions != versions:
                seq.is_pure = False  # the tree has a page of older keys, for which it cannot give up its own
                return
            if node.page != page:
                seq.pages[index] = node.page
                self.pool.ref(seq.pages[index])
                self.pool.unref(page)
                self._changed.append((seq, index))
            elif self.config.tiers and len(self.tree) > num_nodes and not versions:
                self.transfers.store(node)
            seq.node = node
            seq.num_in_tree = index + 1

    def release(self, seq: Sequence) -> None:
        """Release all pages of `seq`, the last one first. Those in the tree can be matched until they are evicted."""
        if seq.restore is not None:
            self.transfers.cancel(seq.restore)
            seq.restore = None
        self._share_partial_page(seq)
        for page in reversed(seq.pages):
            self.pool.unref(page)
        seq.pages = []
        seq.node, seq.num_in_tree = None, 0
        seq.covered = seq.computed = seq.confirmed = 0

    def use_weights(self, message: SetWeights, running: list[Sequence]) -> None:
        """Forget what other weights computed. Those that still run keep it, also keys that are being computed."""
        for seq in running:
            num_planned = seq.max_len - 1 if seq.decodes else seq.computed
            if seq.restore is not None:
                num_planned = seq.restore.num_good * self.config.page_size
            seq.key_versions += [self.versions[-1]] * (num_planned - len(seq.key_versions))
        self._rekeyed += running
        self.weights = message.identity
        self.versions = [*self.versions, message.version][-1 - message.max_key_age :]
        self.forget_prefixes(running, pure=False, keeping=self.versions)

    def forget_prefixes(
        self, running: list[Sequence], *, pure: bool, keeps_tiers: bool = False, keeping: Collection[int] = ()
    ) -> None:
        """Empty the tree, but for what `PrefixTree.clear` keeps. `pure`: pages of running sequences stay valid, and may
        be shared again. `keeps_tiers`: pages of lower tiers stay valid."""
        self.tree.clear(keeping)
        if not (keeps_tiers and self.config.tiers):
            self.transfers.forget_all()
        for seq in running:
            seq.node, seq.num_in_tree = None, 0
            seq.is_pure &= pure

    def update_tiers(self, change: TierChange) -> None:
        """Record where pages are. Subscribers learn of new ones only if requests with the weights in use find them."""
        is_current = change.identity == self.weights
        self.transfers.update(change.pages, change.prompt_ids if is_current else ())

    def table_entries(self) -> list[TableEntry]:
        """Page table changes since the last call, for sequences that still run."""
        changed, self._changed = self._changed, []
        return [TableEntry(s.slot, i, s.pages[i]) for s, i in changed if s.slot is not None and i < len(s.pages)]

    def key_versions(self) -> dict[int, list[int]]:
        """Changes of `Sequence.key_versions` since the last call, by sequence."""
        rekeyed, self._rekeyed = self._rekeyed, []
        return {seq.seq_id: list(seq.key_versions) for seq in rekeyed}

    def exclusive_pages(self, seqs: list[Sequence]) -> int:
        """A lower bound of the pages that preempting these sequences would free."""
        return sum(self.pool.refs[page] == 1 for seq in seqs for page in seq.pages)

    def _may_hit(self, seq: Sequence) -> bool:
        """Whether `seq` may use cached pages. A prompt with `computes_prompt` may do so only after a preemption."""
        return self.config.prefix_cache and not (seq.submit.computes_prompt and seq.is_fresh)

    def _match(self, seq: Sequence) -> None:
        salt = seq.submit.salt
        seq.salt = session_salt(salt) if seq.submit.keeps_pages else cache_salt(self.weights, salt)
        if self._may_hit(seq):
            # At least one token must be computed: the next one is sampled from its logits.
            self.tree.match(seq.salt, seq.tokens, (len(seq.tokens) - 1) // self.config.page_size, seq.path)
        else:
            seq.path = []

    def _find_lower(self, seq: Sequence) -> list[PageKey]:
        """Keys of the pages after the matched ones that are worth loading."""
        keys: list[PageKey] = []
        tiers: list[Tier] = []
        key = self.tree.key_of(seq.path[-1]) if seq.path else None
        for index in range(len(seq.path), (len(seq.tokens) - 1) // self.config.page_size):
            key = self.tree.next_key(seq.salt, key, seq.tokens, index)
            tier = self.transfers.tier_of.get(key.digest)
            if tier is None:
                break
            keys.append(key)
            tiers.append(tier)
        return keys[: self.config.restore_cost.num_pages(tiers, self.config.page_size)]

    def _num_shared(self, seq: Sequence) -> int:
        """Pages of a prompt before its last token's, which every sequence computes in a page of its own."""
        return (seq.num_prompt - 1) // self.config.page_size

    def _share_prompt(self, seq: Sequence, donor: Sequence, plan: StepPlan) -> None:
        """Share the pages of the donor's prompt and copy the last one. Only the last token is then left to compute."""
        shared = self._num_shared(seq)
        seq.pages = donor.pages[:shared]
        for page in seq.pages:
            self.pool.ref(page)
        seq.pages += self._allocate(1)
        seq.salt, seq.key_versions = donor.salt, donor.key_versions[: seq.num_prompt - 1]
        if (seq.num_prompt - 1) % self.config.page_size:
            plan.page_copies.append(PageCopy(donor.pages[shared], seq.pages[-1]))
        # Nothing is confirmed until the step with its last token is read: the donor's step may be in flight.
        seq.computed, seq.confirmed = seq.num_prompt - 1, 0
        seq.node, seq.num_in_tree = None, 0

    def _copy_partial(self, seq: Sequence, partial: Node, plan: StepPlan) -> None:
        """Give `seq` a copy of a partial page, which stays in the tree for others."""
        self.pool.ref(partial.page)
        seq.pages += self._allocate(1)
        self.pool.unref(partial.page)
        plan.page_copies.append(PageCopy(partial.page, seq.pages[-1]))
        seq.key_versions += partial.versions
        seq.computed = seq.confirmed = seq.computed + len(partial.tokens)

    def _share_partial_page(self, seq: Sequence) -> None:
        """Insert the page after the full ones into the tree, with the tokens that are confirmed."""
        start = seq.num_in_tree * self.config.page_size
        if self.config.prefix_cache and seq.is_pure and 0 < seq.confirmed - start < self.config.page_size:
            versions = self._versions(seq, start, seq.confirmed)
            self.tree.extend(
                seq.salt, seq.node, seq.tokens[start : seq.confirmed], seq.pages[seq.num_in_tree], versions
            )

    def _versions(self, seq: Sequence, start: int, end: int) -> Versions:
        """Of the weights that computed the keys of these positions; empty outside of sessions."""
        if not seq.submit.keeps_pages:
            return ()
        known = seq.key_versions[start:end]
        return (*known, *[self.versions[-1]] * (end - start - len(known)))

    def _allocate(self, count: int) -> list[int]:
        if count > self.pool.num_free:
            self.tree.evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def _count(self, seq: Sequence, found: Found) -> None:
        """Count an admission. Sequences that share a prompt are one query, since the others do no lookup."""
        stats, num_tokens = self.tree.stats, seq.computed
        if found.donor is not None:
            return
        if seq.was_admitted:
            stats.again_tokens += num_tokens
            return
        stats.queries += 1
        stats.query_tokens += len(seq.tokens)
        stats.hit_tokens["device"] += num_tokens

    def _count_loaded(self, restore: Restore) -> None:
        """Count loaded pages as hits. A page that failed to load, and all after it, are misses."""
        stats, size = self.tree.stats, self.config.page_size
        for tier in restore.tiers[: restore.num_good - restore.num_held]:
            if restore.is_again:
                stats.again_tokens += size
            else:
                stats.hit_tokens[tier] += size
