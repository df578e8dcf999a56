"""The policy by example: who runs, how much, in which order, and who has to go."""

import ast
from pathlib import Path

import pytest

import glm5.engine
from glm5.common.errors import ConfigError, RequestError
from glm5.engine.scheduler.messages import Abort, Finish, Pause, Resume, SetDepth
from glm5.engine.scheduler.plan import Bucket
from glm5.engine.scheduler.scheduler import Scheduler
from glm5.engine.scheduler.sequence import Group, Sequence
from tests.support.scheduling.driver import TOKEN, Driver, config, rows, submit
from tests.support.scheduling.mutants import MODULES

ENGINE = Path(glm5.engine.__file__).parent


def test_a_prompt_is_computed_then_tokens_one_by_one():
    driver = Driver()
    plans = [driver.step(submit(0, 5, 3)), *driver.run()]
    assert [rows(plan) for plan in plans] == [{0: 5}, {0: 1}, {0: 1}]
    assert [item.start for plan in plans for item in plan.items] == [0, -1, -1]
    assert [plan.max_end for plan in plans] == [5, 6, 7]
    assert [(tuple(out.token_ids), out.reason) for out in driver.outputs] == [
        ((TOKEN,), None),
        ((TOKEN,), None),
        ((TOKEN,), "length"),
    ]


def test_prompts_and_decoding_sequences_share_a_step():
    driver = Driver(max_tokens_per_step=10)
    driver.step(submit(0, 4))
    plan = driver.step(submit(1, 30), submit(2, 3))
    assert rows(plan) == {0: 1, 1: 6, 2: 3}
    assert [item.kind for item in plan.items] == ["decode", "prefill", "prefill"]


def test_half_a_budget_while_others_wait():
    driver = Driver(max_tokens_per_step=10)
    assert rows(driver.step(submit(0, 40))) == {0: 10}
    assert rows(driver.step(submit(1, 30))) == {0: 5, 1: 5}
    assert rows(driver.step(Abort((1,)))) == {0: 10}


def test_what_others_leave_goes_to_the_one_that_is_left():
    driver = Driver(max_tokens_per_step=10)
    driver.tell(submit(0, 40), submit(1, 2))
    assert rows(driver.step()) == {0: 8, 1: 2}


def test_half_a_budget_also_while_others_have_no_slot():
    driver = Driver(max_tokens_per_step=10, max_num_seqs=1)
    driver.tell(submit(0, 40), submit(1, 2))
    assert rows(driver.step()) == {0: 5}


def test_a_largest_chunk():
    driver = Driver(max_prompt_chunk=7)
    assert [rows(driver.step(submit(0, 16))), rows(driver.step()), rows(driver.step())] == [{0: 7}, {0: 7}, {0: 2}]


def test_few_tokens_of_prompts_beside_those_that_decode():
    driver = Driver(max_tokens_per_step=10, max_prompt_tokens=3)
    assert rows(driver.step(submit(0, 4))) == {0: 4}
    assert [rows(driver.step(submit(1, 7))), rows(driver.step())] == [{0: 1, 1: 3}, {0: 1, 1: 3}]
    driver.step(Abort((0,)))
    assert rows(driver.step(submit(2, 30))) == {1: 1, 2: 3}
    assert rows(driver.step(Abort((1,)))) == {2: 10}


def test_whole_prompts_have_every_other_step_of_their_own():
    driver = Driver(max_tokens_per_step=10, full_prompt=6)
    assert rows(driver.step(submit(0, 4), submit(1, 6), submit(2, 5))) == {0: 4, 1: 6}
    assert rows(driver.step()) == {0: 1, 1: 1}
    assert rows(driver.step()) == {2: 5}
    assert rows(driver.step(submit(3, 6))) == {0: 1, 1: 1, 2: 1}
    assert rows(driver.step()) == {3: 6}


def test_few_tokens_of_prompts_go_beside_those_that_decode():
    driver = Driver(max_tokens_per_step=20, full_prompt=8)
    driver.step(submit(0, 4))
    assert rows(driver.step()) == {0: 1}
    assert rows(driver.step(submit(1, 3))) == {0: 1, 1: 3}
    assert rows(driver.step(submit(2, 2), submit(3, 2))) == {2: 2, 3: 2}, "together they have enough"
    assert rows(driver.step(submit(4, 1))) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert rows(driver.step())[4] == 1


def test_whole_prompts_and_longer_ones_take_turns():
    driver = Driver(max_tokens_per_step=10, full_prompt=6)
    assert rows(driver.step(submit(0, 17), submit(1, 6))) == {0: 5, 1: 5}, "the longer one was first"
    assert rows(driver.step(submit(2, 6), submit(3, 2))) == {2: 6, 3: 2}
    assert rows(driver.step(submit(4, 6))) == {0: 5, 1: 1, 2: 1, 3: 1}
    assert rows(driver.step()) == {4: 6}


def test_whole_prompts_keep_to_what_those_that_decode_bear():
    driver = Driver(max_tokens_per_step=10, full_prompt=6, max_prompt_tokens=5)
    driver.step(submit(0, 4))
    driver.step()
    assert rows(driver.step(submit(1, 5), submit(2, 5))) == {1: 5}
    assert rows(driver.step()) == {0: 1, 1: 1}
    assert rows(driver.step()) == {2: 5}
    driver.step()
    assert rows(driver.step(submit(3, 6))) == {0: 1, 1: 1, 2: 1, 3: 5}, "6 tokens are more than they bear at once"


def test_first_come_first_served_within_priority():
    driver = Driver(max_num_seqs=1)
    driver.tell(submit(0, 4, 1, priority=1), submit(1, 4, 1, priority=1), submit(2, 4, 1))
    assert [list(rows(plan)) for plan in driver.run()] == [[2], [0], [1]]


def test_a_short_prompt_does_not_overtake_a_long_one():
    driver = Driver(num_pages=10, prefix_cache=False)
    driver.step(submit(0, 20, 8))
    assert rows(driver.step(submit(1, 30, 4), submit(2, 4, 4))) == {0: 1}
    assert [seq.seq_id for seq in driver.scheduler.waiting] == [1, 2]


def test_better_priority_preempts_to_get_in():
    driver = Driver(max_num_seqs=2)
    driver.step(submit(0, 4, 20, priority=1), submit(1, 4, 20, priority=2))
    plan = driver.step(submit(2, 4, 20, priority=2))
    assert not plan.preempted, "of equal priority, the earlier one stays"
    plan = driver.step(submit(3, 4, 20))
    assert (plan.preempted, [entry.seq_id for entry in plan.entered]) == ([1], [3])


def test_better_priority_does_not_preempt_in_vain():
    driver = Driver(num_pages=20, prefix_cache=False)
    driver.step(submit(0, 60, 20), submit(1, 4, 4, priority=1))
    plan = driver.plan(submit(2, 70, 8))
    assert not plan.preempted, "the page of sequence 1 would not be enough"


def test_the_youngest_is_preempted_and_comes_back():
    driver = Driver(num_pages=6, prefix_cache=False)
    driver.step(submit(0, 8, 12), submit(1, 8, 12))
    plans = driver.run()
    preempted = [seq_id for plan in plans for seq_id in plan.preempted]
    assert preempted == [1]
    assert [out.seq_id for out in driver.outputs if out.reason == "length"] == [0, 1]
    assert sum(len(out.token_ids) for out in driver.outputs) == 24


def test_the_youngest_stands_still_rather_than_lose_its_pages():
    driver = Driver(num_pages=6, prefix_cache=False, page_size=4)
    driver.step(submit(0, 10, 3), submit(1, 8, 12))
    driver.step()
    still = [plan for plan in driver.run() if 1 not in rows(plan)]
    assert not any(plan.preempted for plan in still)
    assert [out.seq_id for out in driver.outputs if out.reason == "length"] == [0, 1]


def test_a_preempted_one_finds_its_pages_again():
    driver = Driver(num_pages=7)
    driver.step(submit(0, 8, 12), submit(1, 8, 12))
    plans = driver.run()
    (again,) = [entry for plan in plans for entry in plan.entered if entry.seq_id == 1]
    assert again.hit_device == 8
    assert driver.scheduler.stats.again_tokens == 8


def test_headroom_is_kept_for_those_that_run():
    driver = Driver(num_pages=10, headroom=0.3)
    driver.step(submit(0, 20, 8))
    assert not driver.step(submit(1, 12, 4)).entered
    driver = Driver(num_pages=10, headroom=0.3)
    assert driver.step(submit(1, 36, 4)).entered, "nobody else runs"


def test_requests_that_never_fit_are_refused_with_the_numbers():
    scheduler = Scheduler(config(num_pages=5, max_model_len=100))
    with pytest.raises(RequestError, match=r"10 tokens and max_tokens 12 need 6 pages of 4 tokens, the cache has 5"):
        scheduler.deliver(0, [submit(0, 10, 12)])
    scheduler.deliver(0, [submit(0, 10, 11)])
    with pytest.raises(RequestError, match="100 tokens, the context is 100"):
        scheduler.check(submit(1, 100))
    with pytest.raises(RequestError, match="empty"):
        scheduler.check(submit(1, 0))
    with pytest.raises(RequestError, match="max_tokens is 0"):
        scheduler.check(submit(1, 5, 0))
    with pytest.raises(RequestError, match="max_depth is -1"):
        scheduler.check(submit(1, 5, max_depth=-1))


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 0},
        {"max_tokens_per_step": 7},
        {"max_depth": -1},
        {"headroom": 1.0},
        {"max_prompt_chunk": 0},
        {"tiers": True, "prefix_cache": False},
    ],
    ids=str,
)
def test_bad_configurations_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        config(**options)


def test_a_context_that_is_full_ends_an_answer():
    driver = Driver(max_model_len=10)
    driver.tell(submit(0, 6, 100))
    driver.run()
    assert sum(len(out.token_ids) for out in driver.outputs) == 4
    assert driver.outputs[-1].reason == "length"


def test_buckets():
    driver = Driver(batch_buckets=(1, 2, 4), token_buckets=(16, 32), max_depth=3)
    driver.accepts = 4
    assert driver.step(submit(0, 5), submit(1, 4), submit(2, 4)).bucket == Bucket(4, 0, 16, decodes_only=False)
    assert driver.step().bucket == Bucket(4, 3, 16, decodes_only=True)
    assert driver.step(submit(3, 60)).bucket == Bucket(4, 2, 64, decodes_only=False)


def test_the_bucket_of_a_full_batch_is_its_size():
    driver = Driver(max_num_seqs=6, batch_buckets=(1, 2, 4, 8))
    plan = driver.step(*(submit(seq_id, 4) for seq_id in range(6)))
    assert plan.bucket == Bucket(6, 0, 64, decodes_only=False)


def test_drafts_leave_half_the_budget_to_prompts():
    driver = Driver(max_depth=3, max_tokens_per_step=16)
    driver.step(submit(0, 4, 40), submit(1, 4, 40), submit(2, 4, 40), submit(3, 4, 40))
    assert rows(driver.step()) == {0: 4, 1: 4, 2: 4, 3: 4}
    assert rows(driver.step(submit(4, 40))) == {0: 2, 1: 2, 2: 2, 3: 2, 4: 8}


def test_drafts_stop_at_the_end_and_at_what_was_asked():
    driver = Driver(max_depth=5)
    driver.tell(submit(0, 4, 3), submit(1, 4, 20, max_depth=2), submit(2, 4, 20))
    driver.step()
    assert {item.seq_id: item.depth for item in driver.step().items} == {0: 1, 1: 2, 2: 5}
    assert {item.depth for item in driver.step(SetDepth(0)).items} == {0}


def test_drafts_shrink_before_anyone_is_preempted():
    driver = Driver(max_depth=3, num_pages=4, prefix_cache=False)
    driver.step(submit(0, 7, 9), submit(1, 7, 9))
    plan = driver.step()
    assert {item.seq_id: item.depth for item in plan.items} == {0: 0, 1: 0}
    assert not plan.preempted


def test_pause_and_resume():
    driver = Driver()
    driver.step(submit(0, 8))
    assert (driver.step(Pause()).wait, driver.step().items) == ("pause", [])
    assert rows(driver.step(Resume())) == {0: 1}
    plan = driver.step(Pause(release=True))
    assert (plan.preempted, driver.scheduler.page_manager.pool.num_free) == ([0], 100)
    assert rows(driver.step(Resume())) == {0: 10}


def test_aborts_and_ends_by_the_client():
    driver = Driver(max_num_seqs=1)
    driver.step(submit(0, 8), submit(1, 8), submit((2, 3), 8))
    plan = driver.step(Finish(0), Abort((1, 77)))
    assert [(out.seq_id, out.reason) for out in plan.ended] == [(0, "stop"), (1, "abort")]
    assert plan.left == [0]
    plan = driver.step(Abort(None))
    assert [out.seq_id for out in plan.ended] == [2, 3]
    assert not driver.scheduler.has_work


def test_late_messages_and_wrong_order_are_bugs():
    driver = Driver(launch_ahead=True)
    driver.plan(submit(0, 8))
    with pytest.raises(AssertionError, match="too late"):
        driver.scheduler.deliver(0, [])
    with pytest.raises(AssertionError):
        driver.scheduler.plan(0)
    driver.plan()
    with pytest.raises(AssertionError, match="unread"):
        driver.plan()
    with pytest.raises(AssertionError, match="oldest"):
        driver.scheduler.apply(1, {})


@pytest.mark.parametrize("module", MODULES.values())
def test_no_clock_no_tensors_no_chance(module):
    tree = ast.parse((ENGINE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names, "nothing was found"
    assert not names & {"torch", "numpy", "time", "random", "os", "threading", "asyncio", "logging", "pathlib"}


@pytest.mark.parametrize(
    ("sampled", "taken", "reason"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], "length"),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], "length"),
        ([1, 9, 3], [1, 9], "stop"),
        ([9, 9, 9, 9], [9, 9], "stop"),
        ([1, 1, 1, 1, 9, 9], [1, 1, 1, 1, 9], "stop"),
        ([1, 1, 1, 1, 1, 9], [1, 1, 1, 1, 1], "length"),
    ],
)
def test_where_an_answer_ends(sampled, taken, reason):
    """Of 5 tokens at most, with stop id 9 not before the second."""
    request = submit(0, 3, 5, stop_ids=frozenset({9}), min_tokens=2)
    seq = Sequence(0, (0, 0), request, 8, 0, Group())
    assert seq.commit(sampled) == (taken, reason)
    assert seq.tokens == [*request.prompt_ids, *taken]
