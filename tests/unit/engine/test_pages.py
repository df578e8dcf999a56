from collections import Counter

import pytest

from glm5.engine.cache.pages import PagePool


def test_a_page_is_free_in_use_or_idle():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    assert (pool.num_free, pool.num_idle, pool.num_available) == (1, 0, 1)
    pool.keep(first)
    pool.unref(first)
    pool.unref(second)
    assert (pool.num_free, pool.num_idle, pool.num_available) == (2, 1, 3)
    pool.ref(first)
    assert (pool.num_free, pool.num_idle) == (2, 0)
    pool.forget(first)
    pool.unref(first)
    assert (pool.num_free, pool.num_idle) == (3, 0)


def test_the_oldest_idle_page_is_the_one_idle_for_longest():
    pool = PagePool(3)
    pages = pool.allocate(3)
    for page in pages:
        pool.keep(page)
    for page in reversed(pages):
        pool.unref(page)
    assert pool.oldest_idle() == pages[2]
    pool.ref(pages[2])
    pool.unref(pages[2])
    assert pool.oldest_idle() == pages[1]


def _release_twice(pool):
    (page,) = pool.allocate(1)
    pool.unref(page)
    pool.unref(page)


def _keep_twice(pool):
    (page,) = pool.allocate(1)
    pool.keep(page)
    pool.keep(page)


MISUSES = {
    "too many": lambda pool: pool.allocate(3),
    "released twice": _release_twice,
    "kept twice": _keep_twice,
    "a free page referenced": lambda pool: pool.ref(0),
    "a free page kept": lambda pool: pool.keep(0),
    "forgotten, not kept": lambda pool: pool.forget(0),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())
def test_misuse_is_noticed(misuse):
    with pytest.raises(AssertionError):
        misuse(PagePool(2))


def test_random_use_against_sets(rng):
    pool = PagePool(12)
    held: Counter[int] = Counter()
    kept: set[int] = set()
    for _ in range(5000):
        match rng.randrange(5):
            case 0:
                count = rng.randint(0, 3)
                if count <= pool.num_free:
                    pages = pool.allocate(count)
                    assert not kept.union(held) & set(pages), "a page was given to two"
                    held.update(pages)
            case 1 if held:
                page = rng.choice(sorted(held))
                pool.unref(page)
                held -= Counter([page])
            case 2 if kept or held:
                page = rng.choice(sorted(kept.union(held)))
                pool.ref(page)
                held[page] += 1
            case 3 if held.keys() - kept:
                page = rng.choice(sorted(held.keys() - kept))
                pool.keep(page)
                kept.add(page)
            case 4 if kept:
                page = rng.choice(sorted(kept))
                pool.forget(page)
                kept.remove(page)
        idle = kept - held.keys()
        assert pool.refs == [held[page] for page in range(12)]
        assert (pool.num_idle, pool.num_free) == (len(idle), 12 - len(idle) - len(held))
        assert not idle or pool.oldest_idle() in idle
