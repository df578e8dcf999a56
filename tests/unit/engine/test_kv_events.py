"""Events of the KV cache: a router that reads only them knows the prefix tree, whatever happens to the engine.

Random lives of a scheduler on a device whose keys can be told apart, and of an engine core with real tiers. Controls:
a tree or tier that forgets to tell is noticed.
"""

import pytest

from glm5.engine.cache.changes import CacheChanges
from glm5.engine.cache.prefix import PrefixTree, cache_salt, page_keys
from glm5.engine.scheduler.page_manager import PageManager
from glm5.engine.scheduler.scheduler import Scheduler
from glm5.engine.scheduler.transfers import Transfers
from glm5.engine.transport.kv_events import block_hash
from glm5.engine.transport.wire import UpdateWeightsCall
from tests.support.core_driver import CoreDriver
from tests.support.kv_events import RouterView
from tests.support.scheduling.world import Rates, World
from tests.unit.engine.test_core_random import Life

# The hardest to notice needed 12.
WORLDS_PER_MUTANT = 100


class TellingScheduler(Scheduler):
    """Its changes are read by a router after every plan and every result."""

    def __init__(self, config, **more):
        super().__init__(config, **more)
        self.changes = self.page_manager.tree.changes = CacheChanges()
        self.view = RouterView(config.page_size)

    def plan(self, step):
        plan = super().plan(step)
        self._read()
        return plan

    def apply(self, step, results):
        outputs = super().apply(step, results)
        self._read()
        return outputs

    def _read(self) -> None:
        self.view.read(self.changes.take())
        self.view.check(self.page_manager)


def live(seed: int, **rates) -> tuple[int, int]:
    """A random life; its numbers of requests and of events."""
    try:
        world = World(seed, rates=Rates(**rates), make=TellingScheduler)
        world.run()
        return world.num_submitted, world.scheduler.view.num_events
    except Exception as error:
        error.add_note(f"seed {seed} of World({rates})")
        raise


def test_a_router_knows_the_tree_of_random_schedulers():
    found = [live(seed) for seed in range(10)]
    assert sum(requests for requests, _ in found) >= 80
    assert sum(events for _, events in found) > 200, "too little happens"


@pytest.mark.long
def test_a_router_knows_the_tree_after_ten_thousand_requests():
    num_requests = sum(live(10_000 + seed, num_requests=50, max_n=4)[0] for seed in range(200))
    assert num_requests >= 10_000


class TellingLife(Life):
    """A random life of a core whose events a router reads after every turn."""

    def __init__(self, rng, folder):
        super().__init__(rng, folder)
        core = self.driver.core
        pages = core.scheduler.page_manager
        changes = pages.tree.changes = CacheChanges()
        view = self.view = RouterView(self.driver.config.page_size)
        step = core.step

        def telling_step():
            messages = step()
            view.read(changes.take())
            view.check(pages)
            return messages

        core.step = telling_step


@pytest.mark.parametrize("number", range(2))
def test_a_router_knows_the_tree_of_random_engines(number, rng, tmp_path):
    TellingLife(rng, tmp_path).run(num_requests=14)


@pytest.mark.long
@pytest.mark.parametrize("number", range(60))
def test_a_router_knows_the_tree_of_many_random_engines(number, rng, tmp_path):
    TellingLife(rng, tmp_path).run(num_requests=30)


def removals_are_not_told(monkeypatch):
    monkeypatch.setattr(CacheChanges, "removed", lambda self, digest: None)


def a_parent_is_not_told(monkeypatch):
    monkeypatch.setattr(PrefixTree, "parent_digest", lambda self, node: None)


def evictions_of_tiers_are_not_told(monkeypatch):
    monkeypatch.setattr(CacheChanges, "moved", lambda self, digest, tier: None)


def other_weights_are_not_told(monkeypatch):
    monkeypatch.setattr(Transfers, "forget_all", lambda self: None)
    monkeypatch.setattr(PrefixTree, "_forget", silent(PrefixTree._forget))


def silent(method):
    def quiet(self, *args):
        changes, self.changes = self.changes, None
        method(self, *args)
        self.changes = changes

    return quiet


@pytest.mark.parametrize(
    "break_it",
    [removals_are_not_told, a_parent_is_not_told, evictions_of_tiers_are_not_told, other_weights_are_not_told],
)
def test_what_is_not_told_is_noticed(break_it, monkeypatch):
    break_it(monkeypatch)
    for seed in range(12, 12 + WORLDS_PER_MUTANT):  # the first ones notice little
        try:
            live(seed)
        except (AssertionError, KeyError) as error:
            print(f"seed {seed}: {error!r:.200}")
            return
    pytest.fail("nothing noticed")


def watched(**options) -> tuple[CoreDriver, RouterView, CacheChanges]:
    driver = CoreDriver(**options)
    changes = driver.core.scheduler.page_manager.tree.changes = CacheChanges()
    return driver, RouterView(driver.config.page_size), changes


def settle(driver: CoreDriver) -> None:
    while driver.core.has_work:
        driver.num_turns = 0
        driver.turn()


def test_pages_of_tiers_are_told_in_full(tmp_path):
    driver, view, changes = watched(tiers=tmp_path, host_pages=8, num_pages=14, max_model_len=44)
    for number in range(5):
        driver.ask(driver.prompt(40, number), max_tokens=2)
        settle(driver)
    driver.core.tiering.copies.flush(30)
    driver.core.tiering.copies.done()
    driver.ask(driver.prompt(3, 9), max_tokens=2)
    settle(driver)
    view.read(changes.take())
    view.check(driver.core.scheduler.page_manager)
    view.check_tiers(driver.core.scheduler.page_manager)
    assert view.blocks["CPU"]
    assert view.blocks["STORAGE"]
    driver.core.close()
    # Another process finds them on disk when it is asked for such a prompt.
    other, view, changes = watched(tiers=tmp_path, num_pages=14, max_model_len=44)
    other.ask(other.prompt(40, 0), max_tokens=2)
    settle(other)
    view.read(changes.take())
    keys = list(page_keys(other.prompt(40, 0), 4, cache_salt(other.weights.identity, b"")))
    found = {block_hash(key.digest) for key in keys} & (view.blocks["STORAGE"].keys() | view.blocks["CPU"].keys())
    assert found
    view.check(other.core.scheduler.page_manager)
    other.core.close()


def test_old_pages_in_tiers_are_not_told_after_new_weights():
    driver, view, changes = watched(tiers=True, num_pages=14, max_model_len=44)
    driver.ask(driver.prompt(40), max_tokens=2)
    settle(driver)
    view.read(changes.take())
    assert view.blocks["CPU"]
    driver.call(UpdateWeightsCall(1, "/1"))
    settle(driver)
    view.read(changes.take())
    assert not any(view.blocks.values())
    driver.core.close()


def test_hashes_depend_on_prefix_salt_and_weights():
    prompt, other = [1, 2, 3, 4, 5, 6, 7, 8], [9, 2, 3, 4, 5, 6, 7, 8]
    salts = [cache_salt(b"w", b""), cache_salt(b"w", b"a"), cache_salt(b"v", b""), cache_salt(b"", b"w")]
    names = [block_hash(key.digest) for salt in salts for ids in (prompt, other) for key in page_keys(ids, 4, salt)]
    assert len(set(names)) == len(names) == 16
    again = [block_hash(key.digest) for key in page_keys(prompt, 4, salts[0])]
    assert again == names[:2]
    assert all(0 <= name < 1 << 64 for name in names)


def test_nothing_is_computed_when_nobody_wants_to_know(monkeypatch):
    def fail(*args):
        raise AssertionError("a key was hashed")

    monkeypatch.setattr("glm5.engine.cache.prefix.page_key", fail)
    driver = CoreDriver()
    driver.ask(driver.prompt(40), max_tokens=20)
    driver.run()
    assert len(driver.core.scheduler.page_manager.tree) > 10
    assert isinstance(driver.core.scheduler.page_manager, PageManager)
