from itertools import islice

from glm5.engine.cache.changes import CacheChanges
from glm5.engine.cache.pages import PagePool
from glm5.engine.cache.prefix import Node, PrefixTree, cache_salt, page_keys

PAGE_SIZE = 2


def make_tree(num_pages=8) -> PrefixTree:
    return PrefixTree(PagePool(num_pages), PAGE_SIZE)


def insert(tree: PrefixTree, token_ids: list[int], salt: bytes = b"") -> list[int]:
    """Put the full pages of a sequence into the tree, as one that ends at once would. The pages that it used."""
    num_pages = len(token_ids) // PAGE_SIZE
    if num_pages > tree.pool.num_free:
        tree.evict(num_pages - tree.pool.num_free)
    pages, node = tree.pool.allocate(num_pages), None
    for number in range(num_pages):
        tokens = token_ids[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]
        node = tree.extend(salt, node, tokens, pages[number])
        if node.page != pages[number]:
            tree.pool.ref(node.page)
            tree.pool.unref(pages[number])
            pages[number] = node.page
    for page in reversed(pages):
        tree.pool.unref(page)
    return pages


def match(tree: PrefixTree, token_ids: list[int], salt: bytes = b"", path: list[Node] | None = None) -> list[int]:
    path = [] if path is None else path
    tree.match(salt, token_ids, len(token_ids) // PAGE_SIZE, path)
    return [node.page for node in path]


def test_the_longest_prefix_of_full_pages_matches():
    tree = make_tree()
    pages = insert(tree, [1, 2, 3, 4, 5])
    assert match(tree, [1, 2, 3, 4, 5, 6]) == pages[:2]
    assert match(tree, [1, 2, 3]) == pages[:1]
    assert match(tree, [1, 2, 9, 4]) == pages[:1]
    assert match(tree, [2, 1]) == []


def test_salts_do_not_mix():
    tree = make_tree()
    insert(tree, [1, 2], b"a")
    assert match(tree, [1, 2], b"b") == []
    assert len({cache_salt(weights, salt) for weights in (b"", b"1", b"1:") for salt in (b"", b"0", b":", b"1:")}) == 12


def test_the_same_page_is_kept_once():
    tree = make_tree()
    assert insert(tree, [1, 2, 3, 4]) == insert(tree, [1, 2, 3, 4])
    assert len(tree) == 2
    assert tree.pool.num_available == 8


def test_the_least_recently_used_leaf_goes_first():
    tree = make_tree(4)
    a, b = insert(tree, [1, 2, 3, 4])
    c, d = insert(tree, [1, 2, 5, 6])[1], insert(tree, [7, 8])[0]
    assert {node.page for node in tree.nodes()} == {a, b, c, d}
    order = []
    while len(tree):
        before = {node.page for node in tree.nodes()}
        tree.evict(1)
        order += before - {node.page for node in tree.nodes()}
    assert order == [b, c, a, d]
    assert len(tree._roots) == 0
    assert tree.stats.evicted_pages == 4


def test_pages_in_use_are_not_evicted():
    tree = make_tree(2)
    page = insert(tree, [1, 2])[0]
    tree.pool.ref(page)
    insert(tree, [3, 4])
    tree.evict(1)
    assert match(tree, [1, 2]) == [page]
    assert match(tree, [3, 4]) == []


def test_a_page_that_only_a_copy_holds_goes_with_its_parent():
    tree = make_tree(2)
    parent, child = insert(tree, [1, 2, 3, 4])
    tree.pool.ref(child)
    tree.evict(1)
    assert len(tree) == 0
    assert not tree.pool.is_kept(child)
    assert (tree.pool.refs[parent], tree.pool.refs[child]) == (0, 1)
    tree.pool.unref(child)
    assert tree.pool.num_free == 2


def test_a_page_that_became_idle_after_its_parent_goes_with_it():
    tree = make_tree(2)
    _, child = insert(tree, [1, 2, 3, 4])
    tree.pool.ref(child)
    tree.pool.unref(child)
    tree.evict(2)
    assert tree.pool.num_free == 2


def test_a_match_is_corrected_after_evictions_and_additions():
    tree = make_tree(3)
    path: list[Node] = []
    pages = insert(tree, [1, 2, 3, 4])
    assert match(tree, [1, 2, 3, 4, 5, 6], path=path) == pages
    tree.evict(1)
    assert match(tree, [1, 2, 3, 4, 5, 6], path=path) == pages[:1]
    more = insert(tree, [1, 2, 3, 4, 5, 6])
    assert match(tree, [1, 2, 3, 4, 5, 6], path=path) == more
    tree.clear()
    assert match(tree, [1, 2, 3, 4, 5, 6], path=path) == []
    assert tree.pool.num_free == 3


def test_the_longest_partial_page_matches_and_nobody_learns_of_it():
    tree = PrefixTree(PagePool(8), 4)
    tree.changes = CacheChanges()
    page, *partial = tree.pool.allocate(4)
    node = tree.extend(b"", None, [1, 2, 3, 4], page)
    for tokens, own in zip(([5], [5, 6], [7, 7, 7]), partial, strict=True):
        tree.extend(b"", node, tokens, own)
    assert len(tree.changes.take()) == 1

    def found(*token_ids: int) -> int | None:
        hit = tree.match_partial(b"", [1, 2, 3, 4, *token_ids], [node])
        return None if hit is None else hit.page

    assert [found(5, 6, 8), found(5, 6), found(5, 9, 9, 9, 9), found(6, 6, 6), found(5)] == [
        partial[1],
        partial[0],
        partial[0],
        None,
        None,
    ]
    assert tree.match_partial(b"", [5, 6, 7], []) is None
    for own in (*partial, page):
        tree.pool.unref(own)
    tree.evict(2)
    assert (found(5, 6, 8), found(7, 7, 7, 7), tree.changes.take()) == (None, partial[2], [])
    tree.evict(2)
    assert len(tree.changes.take()) == 1
    assert tree.pool.num_free == 8


def test_keys_are_those_of_the_prompt():
    tree = make_tree()
    insert(tree, [1, 2, 3, 4], b"s")
    path: list[Node] = []
    match(tree, [1, 2, 3, 4], b"s", path)
    keys = list(page_keys([1, 2, 3, 4, 5], PAGE_SIZE, b"s"))
    assert [tree.key_of(path[1]), tree.key_of(path[0])] == keys[::-1]
    assert tree.next_key(b"s", keys[0], [1, 2, 3, 4], 1) == keys[1]
    others = [*page_keys([1, 2, 3, 4], PAGE_SIZE, b"t"), *islice(page_keys([3, 4], PAGE_SIZE, b"s"), 1)]
    assert not {key.digest for key in others} & {key.digest for key in keys}


def test_random_prefixes_against_a_set_of_prefixes(rng):
    """What matches is exactly the prefixes that are kept; which are evicted is the least recently used first."""
    tree = make_tree(12)
    kept: list[tuple[bytes, tuple[int, ...]]] = []  # least recently used first, longer before shorter
    for _ in range(2000):
        salt = rng.choice((b"a", b"b"))
        tokens = [rng.randrange(2) for _ in range(rng.randint(0, 9))]
        prefixes = [(salt, tuple(tokens[:end])) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)]
        number = 0
        while number < len(prefixes) and prefixes[number] in kept:
            number += 1
        assert len(match(tree, tokens, salt)) == number
        if rng.random() < 0.05:
            tree.clear()
            kept.clear()
            continue
        room = 12 - len(kept)
        insert(tree, tokens, salt)
        kept = kept[max(0, len(prefixes) - room) :]
        kept = [prefix for prefix in kept if prefix not in prefixes] + prefixes[::-1]
        assert len(tree) == len(kept)
