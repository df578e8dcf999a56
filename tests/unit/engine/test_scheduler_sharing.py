"""Launch-ahead, and pages that are shared, copied, loaded and stored, by example."""

from glm5.engine.cache.prefix import cache_salt, page_keys
from glm5.engine.scheduler.config import RestoreCost
from glm5.engine.scheduler.messages import Abort, CopyDone, Pause, ResetCache, Resume, SetWeights, TierChange
from tests.support.scheduling.driver import TOKEN, Driver, prompt, rows, submit

CHEAP = RestoreCost(host_page=0, disk_page=1, fixed=0)


def known_pages(num_tokens: int, tier="disk", weights: bytes = b"") -> TierChange:
    """What a lower tier says it has of `prompt(num_tokens)`."""
    keys = page_keys(prompt(num_tokens), 4, cache_salt(weights, b""))
    return TierChange(tuple((key.digest, tier) for key in keys))


def test_bounds_with_a_step_in_flight():
    driver = Driver(launch_ahead=True, max_depth=3)
    driver.plan(submit(0, 6, 40))
    driver.plan()  # tokens 6 and, at most, 9
    driver.read()
    plan = driver.plan()
    assert (plan.items[0].num_rows, plan.max_end) == (4, 14)
    driver.accepts = 2
    driver.read()
    seq = driver.scheduler.live[0]
    assert (len(seq.tokens), seq.min_len, seq.max_len) == (9, 10, 13)


def test_room_for_what_is_drafted_ahead():
    """From 11 tokens on, the next step's drafts are written up to position 12 after a prompt, 18 after a step."""
    driver = Driver(launch_ahead=True, max_depth=3)
    driver.plan(submit(0, 11, 40))
    seq = driver.scheduler.live[0]
    assert seq.covered == 16
    driver.plan()
    assert seq.covered == 20
    driver = Driver(launch_ahead=True, max_depth=3, num_pages=3)
    driver.plan(submit(0, 11, 2))
    assert driver.scheduler.live[0].covered == 12, "the end is near"


def test_no_step_beyond_a_certain_end():
    driver = Driver(launch_ahead=True)
    driver.plan(submit(0, 6, 2))
    driver.plan()
    driver.read()
    plan = driver.plan()
    assert (plan.items, plan.wait) == ([], "results")
    driver.read()
    assert driver.outputs[-1].reason == "length"
    assert driver.plan().wait == "requests"


def test_what_follows_a_stop_is_discarded():
    driver = Driver(launch_ahead=True)
    driver.plan(submit(0, 6, 20, stop_ids=frozenset({TOKEN})))
    driver.plan()
    assert [out.reason for out in driver.read()] == ["stop"]
    assert driver.read() == []
    assert not driver.scheduler.has_work


def test_grammars_sit_out_a_step_while_others_run():
    driver = Driver(launch_ahead=True)
    driver.plan(submit(0, 4, needs_last_token=True), submit(1, 4))
    shares = []
    for _ in range(4):
        shares.append(rows(driver.plan()))
        driver.read()
    assert shares == [{1: 1}, {0: 1, 1: 1}, {1: 1}, {0: 1, 1: 1}]


def test_tokens_of_a_step_in_flight_survive_preemption():
    driver = Driver(launch_ahead=True, num_pages=8)
    driver.plan(submit(0, 8))
    plan = driver.plan(Pause(release=True))
    assert plan.preempted == [0]
    assert driver.plan(Resume()).wait == "results", "its token decides how it goes on"
    assert [tuple(out.token_ids) for out in driver.read()] == [(TOKEN,)]
    (entry,) = driver.plan().entered
    assert entry.token_ids[8:] == [TOKEN]


def test_only_pages_that_were_read_are_shared():
    driver = Driver(launch_ahead=True)
    driver.plan(submit(0, 9, prompt_ids=prompt(9)))
    plan = driver.plan(submit(1, 9, prompt_ids=prompt(9)))
    assert plan.entered[0].hit_device == 0
    driver.read()
    plan = driver.plan(submit(2, 9, prompt_ids=prompt(9)))
    assert (plan.entered[0].hit_device, rows(plan)[2]) == (8, 1)


def test_who_computed_the_same_pages_swaps_to_the_shared_ones():
    driver = Driver()
    driver.step(submit(0, 9, prompt_ids=prompt(9)), submit(1, 9, prompt_ids=prompt(9)))
    first, second = (driver.scheduler.live[seq_id] for seq_id in (0, 1))
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    plan = driver.step()
    assert [(entry.slot, entry.column) for entry in plan.table] == [(second.slot, 0), (second.slot, 1)]


def test_the_last_token_of_a_prompt_is_always_computed():
    driver = Driver()
    driver.tell(submit(0, 8, 1, prompt_ids=prompt(8)))
    driver.run()
    plan = driver.step(submit(1, 8, 1, prompt_ids=prompt(8)))
    assert (plan.entered[0].hit_device, rows(plan)) == (4, {1: 4})
    stats = driver.scheduler.stats
    assert (stats.queries, stats.query_tokens, stats.hit_tokens["device"], stats.missed_tokens) == (2, 16, 4, 12)


def test_the_next_turn_of_a_conversation_begins_with_a_copy_of_its_last_page():
    driver = Driver(max_model_len=40)
    driver.tell(submit(0, 6, 2, prompt_ids=prompt(6)))
    driver.run()
    said = [*prompt(6), TOKEN, TOKEN]  # the last of which was not computed
    plan = driver.step(submit(1, 10, 2, prompt_ids=[*said, 1, 2]), submit(2, 9, 2, prompt_ids=[*said, 3]))
    assert rows(plan) == {1: 3, 2: 2}
    assert [entry.hit_device for entry in plan.entered] == [7, 7]
    (source,) = {copy.source for copy in plan.page_copies}
    assert [copy.target for copy in plan.page_copies] == [entry.pages[1] for entry in plan.entered]
    assert driver.scheduler.page_manager.pool.is_idle(source)
    driver.run()
    assert driver.step(submit(3, 8, 2, prompt_ids=[*prompt(5), 9, 9, 9])).entered[0].hit_device == 4


def test_a_partial_page_is_no_reason_to_wait_for_pages():
    driver = Driver(num_pages=3)
    driver.tell(submit(0, 6, 2, prompt_ids=prompt(6)))
    driver.run()
    plan = driver.step(submit(1, 9, 1, prompt_ids=[*prompt(6), TOKEN, 1, 2]))
    assert (plan.entered[0].hit_device, plan.page_copies) == (4, [])


def test_a_prompt_that_must_be_computed_is():
    driver = Driver()
    driver.tell(submit(0, 9, 1, prompt_ids=prompt(9)))
    driver.run()
    assert rows(driver.step(submit(1, 9, 1, prompt_ids=prompt(9), computes_prompt=True))) == {1: 9}


def test_several_answers_share_the_pages_of_their_prompt():
    for prefix_cache in (True, False):
        driver = Driver(prefix_cache=prefix_cache, launch_ahead=True)
        plan = driver.plan(submit((0, 1, 2), 10))
        assert rows(plan) == {0: 10}
        plan = driver.plan()
        assert rows(plan) == {0: 1, 1: 1, 2: 1}
        pages = [driver.scheduler.live[seq_id].pages for seq_id in range(3)]
        assert [page_ids[:2] for page_ids in pages] == [pages[0][:2]] * 3
        assert [tuple(copy) for copy in plan.page_copies] == [(pages[0][2], pages[i][2]) for i in (1, 2)]
        assert [item.start for item in plan.items] == [-1, 9, 9]
        assert [entry.donor_slot for entry in plan.entered] == [0, 0]
        assert driver.scheduler.page_manager.pool.num_free == 100 - 5


def test_an_empty_last_page_is_not_copied():
    driver = Driver()
    driver.step(submit((0, 1), 9))
    assert not driver.step().page_copies


def test_others_take_over_a_prompt_whose_first_sequence_is_aborted():
    driver = Driver(max_tokens_per_step=8)
    driver.step(submit((0, 1, 2), 20))
    plan = driver.step(Abort((0,)))
    assert rows(plan) == {1: 8}
    driver.run()
    assert sorted(out.seq_id for out in driver.outputs if out.reason) == [1, 2]


def test_full_pages_are_stored_once_and_loaded_when_that_is_cheaper():
    driver = Driver(tiers=True, restore_cost=CHEAP)
    driver.tell(submit(0, 9, 1, prompt_ids=prompt(9)))
    plans = driver.run()
    stores = [copy for plan in plans for copy in plan.stores]
    assert [copy.key for copy in stores] == list(page_keys(prompt(9), 4, cache_salt(b"", b"")))
    plan = driver.step(ResetCache(), submit(1, 9, 1, prompt_ids=prompt(9)))
    assert [copy.key for copy in plan.loads] == [copy.key for copy in stores]
    assert (plan.items, plan.wait, plan.entered[0].hit_lower) == ([], "copies", 8)
    driver.end_copies(plan)
    plan = driver.step()
    assert rows(plan) == {1: 1}
    assert not plan.stores, "the tier has them already"
    assert driver.scheduler.stats.hit_tokens == {"device": 0, "host": 8, "disk": 0}


def test_pages_are_computed_when_that_is_cheaper():
    driver = Driver(tiers=True, restore_cost=RestoreCost(host_page=0, disk_page=0, fixed=9))
    plan = driver.step(known_pages(8), submit(0, 13, prompt_ids=prompt(13)))
    assert (plan.loads, rows(plan)) == ([], {0: 13})
    assert RestoreCost(1, 5, 2).num_pages(["host", "host", "disk", "host"], 4) == 4
    assert RestoreCost(1, 9, 2).num_pages(["host", "host", "disk", "host"], 4) == 2
    assert RestoreCost(1, 9, 6).num_pages(["host", "host", "disk", "host"], 4) == 0


def test_a_failed_load_is_a_miss():
    driver = Driver(tiers=True, restore_cost=CHEAP)
    plan = driver.step(known_pages(12), submit(0, 13, prompt_ids=prompt(13)))
    driver.tell(*(CopyDone(copy.copy_id, tier) for copy, tier in zip(plan.loads, ("disk", None, "disk"), strict=True)))
    assert rows(driver.step()) == {0: 9}


def test_loads_of_an_aborted_sequence_hold_their_pages_until_they_end():
    driver = Driver(tiers=True, restore_cost=CHEAP, max_loads=2)
    plan = driver.step(known_pages(12), submit(0, 13, prompt_ids=prompt(13)))
    assert len(plan.loads) == 2
    first, second = plan.loads
    driver.tell(CopyDone(first.copy_id, "disk"), Abort((0,)))
    plan = driver.step()
    assert (plan.cancelled, plan.loads, plan.wait) == ([second.copy_id], [], "copies")
    assert driver.scheduler.page_manager.pool.num_free == 99
    driver.tell(CopyDone(second.copy_id, None))
    assert driver.step().wait == "requests"
    assert driver.scheduler.page_manager.pool.num_free == 100


def test_others_run_while_one_waits_for_its_pages():
    driver = Driver(tiers=True, restore_cost=CHEAP)
    plan = driver.step(known_pages(12), submit(0, 13, prompt_ids=prompt(13)), submit(1, 20))
    assert rows(plan) == {1: 20}
    assert len(plan.loads) == 3


def test_stores_that_lag_lapse_with_their_pages():
    driver = Driver(tiers=True, num_pages=4, max_stores=1)
    (store,) = driver.step(submit(0, 13, 1)).stores or driver.step().stores
    assert driver.scheduler.page_manager.pool.num_available == 3
    for seq_id in range(1, 12):
        plan = driver.step(submit(seq_id, 9, 1))
        assert not plan.stores
    assert len(driver.scheduler.page_manager.transfers._to_store) <= 2 * 4
    driver.tell(CopyDone(store.copy_id, "host"))
    (store,) = driver.step().stores
    assert store.key in page_keys(prompt(9, 300 * 12), 4, cache_salt(b"", b""))


def test_a_pool_pinned_by_stores_waits_for_them():
    driver = Driver(tiers=True, num_pages=2, max_stores=4)
    driver.step(submit(0, 5, 4))
    driver.step()
    driver.step(submit(1, 8, 1), Abort((0,)))
    plan = driver.step()
    assert (plan.items, plan.wait) == ([], "copies")


def test_new_weights_never_share_old_pages():
    for recompute in (True, False):
        driver = Driver(tiers=True, restore_cost=CHEAP)
        driver.step(submit(0, 9, prompt_ids=prompt(9)))
        driver.end_copies(driver.step())
        plan = driver.step(SetWeights(1, recompute, b"1"), submit(1, 9, prompt_ids=prompt(9)))
        assert plan.version == 1
        assert rows(plan) == ({0: 11, 1: 9} if recompute else {0: 1, 1: 9})
        plan = driver.step(submit(2, 9, prompt_ids=prompt(9)))
        assert plan.entered[0].hit_device == 8
        assert len(driver.scheduler.page_manager.tree._roots) == 1


def test_nothing_is_shared_without_a_prefix_cache():
    driver = Driver(prefix_cache=False)
    driver.tell(submit(0, 9, 1, prompt_ids=prompt(9)))
    driver.run()
    assert rows(driver.step(submit(1, 9, 1, prompt_ids=prompt(9)))) == {1: 9}
    assert len(driver.scheduler.page_manager.tree) == 0
