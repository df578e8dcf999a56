"""The prefix cache: a radix tree over token ids, with one page in each node.

    root of a salt -> page of tokens 0..Z-1 -> page of tokens Z..2Z-1 -> ... -> partial page

A node is found by the token ids themselves, so two prefixes never collide. Each salt (tenant, weights) has a root of
its own, so caches never mix. The root of a session outlives weights, and each of its pages says which computed it.

A page is inserted when it is full and confirmed. A sequence that computed an equal page switches to the tree's, so a
sequence that holds a node's page holds those of all its ancestors.

The last page of a sequence that ends is inserted as it is, partly full, for the next turn of its conversation. Nobody
holds a partial page, since its sequences go on differently: each gets a copy. It has no children, is in no lower tier,
and subscribers do not learn of it.

The tree contains only pages on the device. Pages in host memory and on disk are found by their keys (`transfers.py`),
chained hashes: no token ids need to be kept, and eviction or a page of an earlier process changes one entry.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from glm5.engine.cache.changes import CacheChanges
from glm5.engine.cache.pages import PagePool
from glm5.engine.tiers.key import PageKey, page_key

Salt = bytes
Versions = tuple[int, ...]


def cache_salt(weights: bytes, salt: bytes) -> Salt:
    """The combined salt: prompts share pages only within a tenant's salt and with the same weights.

    `weights` is a globally unique id: pages outlive the process, in which a version number would be ambiguous.
    """
    return b"%d:%b%b" % (len(weights), weights, salt)


def session_salt(salt: bytes) -> Salt:
    """The salt of a session whose pages outlive the weights. It names none, so its pages must stay on the device."""
    return b"session:%b" % salt


def page_keys(token_ids: Sequence[int], page_size: int, salt: Salt) -> Iterator[PageKey]:
    """Keys of a prompt's full pages, to look up in lower tiers. Lazy: the caller can stop at the first miss."""
    key = None
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        key = page_key(key, token_ids[start : start + page_size], salt)
        yield key


class Node:
    """A page and its token ids. `is_kept` until the page leaves the tree. A root has no page (-1).
    `partial_lengths`: the numbers of tokens of partial pages among its children, also of former ones. `versions`: in a
    session, of the weights that computed the keys of each token."""

    __slots__ = ("children", "is_kept", "key", "page", "parent", "partial_lengths", "salt", "tokens", "versions")

    def __init__(self, salt: Salt, parent: "Node | None", tokens: tuple[int, ...], page: int, versions: Versions = ()):
        self.salt, self.parent, self.tokens, self.page, self.versions = salt, parent, tokens, page, versions
        self.is_kept = True
        self.children: dict[tuple[int, ...], Node] = {}
        self.partial_lengths: set[int] = set()
        self.key: PageKey | None = None


@dataclass
class PrefixStats:
    """Counts since the start. A query is the first admission of a sequence; hits after a preemption are `again_tokens`.
    Pages of lower tiers count as hits once they are loaded."""

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    again_tokens: int = 0
    evicted_pages: int = 0

    @property
    def missed_tokens(self) -> int:
        return self.query_tokens - sum(self.hit_tokens.values())


class PrefixTree:
    """Shares pages of `pool` between sequences. Evicts idle pages only, least recently used first.

    `changes` None: nobody wants to know what enters and leaves the tree.
    """

    def __init__(self, pool: PagePool, page_size: int):
        self.pool, self.page_size = pool, page_size
        self.changes: CacheChanges | None = None
        self.stats = PrefixStats()
        self._roots: dict[Salt, Node] = {}
        self._node_of: dict[int, Node] = {}

    def __len__(self) -> int:
        """Number of pages in the tree."""
        return len(self._node_of)

    def nodes(self) -> Iterator[Node]:
        return iter(self._node_of.values())

    def match(self, salt: Salt, token_ids: Sequence[int], max_pages: int, path: list[Node]) -> None:
        """Make `path` the longest chain of nodes for the first pages of `token_ids`. Takes no references.

        `path` may hold an earlier match of the same tokens, which is updated in place: a waiting sequence is matched
        at every step.
        """
        del path[max_pages:]
        while path and not path[-1].is_kept:
            path.pop()
        node = path[-1] if path else self._roots.get(salt)
        while node is not None and len(path) < max_pages:
            node = node.children.get(self._tokens_of_page(token_ids, len(path)))
            if node is not None:
                path.append(node)

    def match_partial(self, salt: Salt, token_ids: Sequence[int], path: Sequence[Node]) -> Node | None:
        """The longest partial page after `path`, a match of `token_ids`, without the last of them."""
        parent = path[-1] if path else self._roots.get(salt)
        if parent is None or not parent.partial_lengths:
            return None
        rest = self._tokens_of_page(token_ids[:-1], len(path))
        for length in sorted(parent.partial_lengths, reverse=True):
            if length <= len(rest) and (node := parent.children.get(rest[:length])) is not None:
                return node
        return None

    def extend(
        self, salt: Salt, parent: Node | None, token_ids: Sequence[int], page: int, versions: Versions = ()
    ) -> Node:
        """The node of a page after `parent` (None: the first page); inserted with `page` if it is missing.

        `token_ids` are the page's own; `versions`: see `Node`, and subscribers do not learn of a session's page. The
        caller holds the pages of `parent` and `page`. It must replace a full page by the node's when they differ, and
        release a partial one.
        """
        if parent is None:
            parent = self._roots.get(salt)
            if parent is None:
                parent = self._roots[salt] = Node(salt, None, (), -1)
        else:
            assert parent.is_kept, "the parent has left the tree"
        tokens = tuple(token_ids)
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(salt, parent, tokens, page, versions)
            self._node_of[page] = node
            self.pool.keep(page)
            if self._is_partial(node):
                parent.partial_lengths.add(len(tokens))
            elif self.changes is not None and not versions:
                self.changes.stored(self.key_of(node).digest, self.parent_digest(node), tokens)
        return node

    def parent_digest(self, node: Node) -> bytes | None:
        """Digest of the page before that of `node`; None if there is none."""
        assert node.parent is not None, "a root has no page"
        return self.key_of(node.parent).digest if node.parent.tokens else None

    def key_of(self, node: Node) -> PageKey:
        """The key of a node's page in lower tiers; hashed on first use."""
        unnamed: list[Node] = []
        above: Node | None = node
        while above is not None and above.tokens and above.key is None:
            unnamed.append(above)
            above = above.parent
        key = above.key if above is not None else None
        for below in reversed(unnamed):
            key = below.key = page_key(key, below.tokens, below.salt)
        assert key is not None, "a root has no key"
        return key

    def next_key(self, salt: Salt, parent: PageKey | None, token_ids: Sequence[int], index: int) -> PageKey:
        """The key of page `index` of `token_ids`, given that of the page before."""
        return page_key(parent, self._tokens_of_page(token_ids, index), salt)

    def evict(self, count: int) -> None:
        """Free `count` idle pages, or a few more."""
        # A page that a copy held becomes idle after its parent, and is removed with it.
        before, free = len(self._node_of), self.pool.num_free + count
        while self.pool.num_free < free:
            self._remove(self._node_of[self.pool.oldest_idle()])
        self.stats.evicted_pages += before - len(self._node_of)

    def clear(self, keeping: Collection[int] = ()) -> None:
        """Remove all nodes but those of sessions with keys of the versions `keeping` alone, also before them. Pages in
        use stay with their sequences, which must not extend the removed nodes."""
        kept = set(keeping)
        for node in list(self._node_of.values()):
            if node.is_kept and not (node.versions and kept.issuperset(node.versions)):
                self._remove(node)

    def _is_partial(self, node: Node) -> bool:
        return len(node.tokens) < self.page_size

    def _tokens_of_page(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.page_size : (index + 1) * self.page_size])

    def _remove(self, node: Node) -> None:
        """Remove a node and those below it, whose pages only copies under way may still hold."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if parent.parent is None and not parent.children:
            del self._roots[node.salt]
        below = [node]
        while below:
            node = below.pop()
            below.extend(node.children.values())
            self._forget(node)

    def _forget(self, node: Node) -> None:
        del self._node_of[node.page]
        self.pool.forget(node.page)
        if self.changes is not None and not (node.versions or self._is_partial(node)):
            self.changes.removed(self.key_of(node).digest)
        node.is_kept = False
        node.children.clear()
