"""What must hold of a scheduler after every call, computed anew from all that it holds."""

from collections import Counter
from itertools import pairwise

from glm5.engine.scheduler.scheduler import Scheduler
from glm5.engine.scheduler.sequence import Sequence


def audit(scheduler: Scheduler) -> None:
    """Pages, tree, slots and queues agree with each other."""
    audit_pages(scheduler)
    audit_tree(scheduler)
    audit_queues(scheduler)


def audit_pages(scheduler: Scheduler) -> None:
    """Every reference has a holder, and every page is in exactly one state."""
    pool = scheduler.page_manager.pool
    held = Counter(page for seq in scheduler.running for page in seq.pages)
    for seq in scheduler.running:
        assert len(set(seq.pages)) == len(seq.pages), f"{seq.seq_id} has a page twice: {seq.pages}"
        assert seq.covered == len(seq.pages) * scheduler.config.page_size
    transfers = scheduler.page_manager.transfers
    held.update(copy.page for copies in (transfers._loads, transfers._stores) for copy in copies.values())
    assert pool.refs == [held[page] for page in range(pool.num_pages)]
    pages, used = set(range(pool.num_pages)), set(held)
    kept = {node.page for node in scheduler.page_manager.tree.nodes()}
    assert {page for page in pages if pool.is_kept(page)} == kept
    assert {page for page in pages if pool.is_idle(page)} == kept - used
    assert sorted(pool._free) == sorted(pages - kept - used), "a page is lost, or free and in use"
    assert (pool.num_free, pool.num_idle) == (len(pages - kept - used), len(kept - used))


def audit_tree(scheduler: Scheduler) -> None:
    """Every node can be reached from its root, and what sequences have put there is theirs."""
    tree, size = scheduler.page_manager.tree, scheduler.config.page_size
    for node in tree.nodes():
        assert node.is_kept
        assert node.parent is not None
        if len(node.tokens) != size:
            assert 0 < len(node.tokens) < size
            assert len(node.tokens) in node.parent.partial_lengths
            assert not node.children
            assert not tree.pool.refs[node.page], "somebody may write a partial page"
        assert node.parent.is_kept
        assert node.parent.children[node.tokens] is node
    for seq in scheduler.running:
        node, number = seq.node, seq.num_in_tree
        assert (node is None) == (number == 0)
        assert seq.confirmed <= len(seq.tokens)
        assert number * size <= seq.confirmed
        while number:
            number -= 1
            assert node is not None
            assert node.is_kept
            assert node.salt == seq.salt
            assert node.page == seq.pages[number], f"{seq.seq_id} has a copy of what the tree has"
            assert node.tokens == tuple(seq.tokens[number * size : (number + 1) * size])
            node = node.parent


def audit_queues(scheduler: Scheduler) -> None:
    """Every live sequence is in one place; those with pages are those with slots; all queues are in order."""
    waiting, running = scheduler.waiting, scheduler.running
    held = [seq for seq in _unique_groups(scheduler) for seq in seq.group.held]
    places = Counter(seq.seq_id for seq in [*waiting, *running, *held])
    assert places == Counter(scheduler.live.keys()), f"{places} {list(scheduler.live)}"
    for queue in (waiting, scheduler.prompting, scheduler.decoding):
        assert all(a.rank < b.rank for a, b in pairwise(queue)), "a queue is out of order"
    for seq in running:
        assert seq.slot is not None
        assert seq.pages
        assert seq.decodes == (seq in scheduler.decoding)
        assert len(seq.tokens) < seq.cap
    for seq in [*waiting, *held]:
        assert seq.slot is None, f"{seq.seq_id} waits with a slot"
        assert not seq.pages, f"{seq.seq_id} waits with pages"
        assert seq.restore is None
    slots = [seq.slot for seq in running]
    free = scheduler._free_slots
    assert sorted([*slots, *free]) == list(range(scheduler.config.max_num_seqs)), f"{slots=} {free=}"


def audit_empty(scheduler: Scheduler) -> None:
    """Nothing is left behind by work that is over, but what the prefix tree remembers."""
    assert not scheduler.has_work
    audit(scheduler)
    assert not scheduler.live
    page_manager = scheduler.page_manager
    assert page_manager.pool.num_available == page_manager.pool.num_pages
    assert page_manager.pool.num_idle == len(page_manager.tree)
    assert not page_manager.transfers.has_work


def _unique_groups(scheduler: Scheduler) -> list[Sequence]:
    """One member of each group."""
    return list({id(seq.group): seq for seq in scheduler.live.values()}.values())
