"""Pause, sleep, other weights and a forgotten cache, under load: every call is answered, and no token is wrong."""

from pathlib import Path

import pytest

from glm5.engine.transport.wire import (
    AbortRequests,
    PauseCall,
    ResetCacheCall,
    ResumeCall,
    SleepCall,
    StatsCall,
    UpdateWeightsCall,
    WakeCall,
)
from tests.support.core_driver import CoreDriver
from tests.support.fake_runner import drawn, extended, hashes

AHEAD = pytest.mark.parametrize("launch_ahead", [True, False])


def under_load(launch_ahead=True, **options) -> CoreDriver:
    """Some requests in every phase."""
    driver = CoreDriver(launch_ahead=launch_ahead, max_num_seqs=4, max_depth=2, max_prompt_chunk=6, **options)
    for number in range(6):
        driver.ask(7 + 5 * number, max_tokens=60, seed=number)
    driver.turn(6)
    return driver


def num_tokens(driver) -> int:
    return sum(len(received.token_ids) for received in driver.received.values())


@AHEAD
def test_pause_and_resume(launch_ahead):
    driver = under_load(launch_ahead)
    assert driver.call(PauseCall(1)).error is None
    count = num_tokens(driver)
    late = driver.ask(5)
    driver.run()
    driver.turn(3)
    assert num_tokens(driver) == count
    assert not driver.core.has_work, "a pause must not spin"
    assert driver.call(StatsCall(2)).result["is_paused"]
    driver.core.receive(AbortRequests((0,)))
    driver.turn()
    assert driver.received[0].reason == "abort"
    driver.call(ResumeCall(3))
    driver.run()
    driver.check(1, 2, 3, 4, 5, *late)
    driver.check_empty()


def test_pause_twice_and_resume_what_runs():
    driver = CoreDriver()
    driver.call(ResumeCall(0))
    driver.call(PauseCall(1))
    driver.call(PauseCall(2))
    driver.call(ResumeCall(3))
    driver.ask(5)
    driver.run()
    driver.check()


@AHEAD
@pytest.mark.parametrize("tiers", [None, True])
def test_sleep_and_wake(launch_ahead, tiers):
    driver = under_load(launch_ahead, tiers=tiers)
    answer = driver.call(SleepCall(1))
    assert answer.result == {"freed_bytes": driver.runner.pool.numel() * 8}
    assert driver.runner.is_released
    driver.ask(5)
    driver.run()
    assert not driver.core.has_work, "an engine that sleeps must not spin"
    assert driver.call(SleepCall(2)).result == {"freed_bytes": 0}
    driver.call(WakeCall(3))
    driver.run()
    driver.check()
    assert {version for received in driver.received.values() for version in received.versions} == {0}
    driver.core.close()


def test_sleep_without_weights_brings_back_the_first_ones():
    driver = under_load()
    driver.call(UpdateWeightsCall(1, "/7", policy="recompute"))
    driver.turn(3)
    assert driver.call(SleepCall(2, level=2)).result["freed_bytes"] == 1000 + driver.runner.pool.numel() * 8
    num_before = {seq_id: len(received.token_ids) for seq_id, received in driver.received.items()}
    assert driver.call(WakeCall(3)).result == {"version": 0}
    driver.run()
    for seq_id, received in driver.received.items():
        assert set(received.versions[num_before[seq_id] :]) <= {0}
    # A number is never given to two sets of weights.
    assert driver.call(UpdateWeightsCall(4, "/8")).result == {"version": 2}


def test_sleep_deeper_and_deeper():
    driver = CoreDriver()
    driver.call(SleepCall(1))
    assert driver.call(SleepCall(2, level=2)).result == {"freed_bytes": 1000}
    assert driver.call(SleepCall(3, level=1)).result == {"freed_bytes": 0}
    assert driver.call(UpdateWeightsCall(4, "/7")).error.startswith("the engine sleeps")
    driver.call(WakeCall(5))
    driver.ask(5)
    driver.run()
    driver.check()


def test_weights_that_could_not_be_read_again_are_not_dropped():
    driver = under_load()
    driver.weights.has_source = False
    answer = driver.call(SleepCall(1, level=2))
    assert (answer.error, answer.kind) == ("came from memory", "RequestError")
    driver.run()
    driver.check()


def test_a_pause_outlives_sleep():
    driver = under_load()
    driver.call(PauseCall(1))
    driver.call(SleepCall(2))
    driver.call(WakeCall(3))
    driver.run()
    count = num_tokens(driver)
    driver.turn(3)
    assert num_tokens(driver) == count
    driver.call(ResumeCall(4))
    driver.run()
    driver.check()


def test_resume_while_asleep_is_refused_and_changes_nothing():
    driver = under_load()
    driver.call(PauseCall(1))
    driver.call(SleepCall(2))
    assert "call wake_up" in driver.call(ResumeCall(3)).error
    driver.call(WakeCall(4))
    count = num_tokens(driver)
    driver.turn(3)
    assert num_tokens(driver) == count
    driver.call(ResumeCall(5))
    driver.run()
    driver.check()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_parts_wake_one_after_the_other(level, first):
    """Nothing is computed before both are awake, and weights are replaced as soon as they are."""
    driver = under_load()
    second = ({"weights", "kv_cache"} - {first}).pop()
    driver.call(SleepCall(1, level=level))
    num_before = num_tokens(driver)
    assert driver.call(UpdateWeightsCall(2, "/7")).error.startswith("the engine sleeps, so its weights cannot")
    driver.call(WakeCall(3, parts=(first,)))
    assert driver.runner.is_released == (first == "weights")
    assert driver.call(StatsCall(4)).result["is_sleeping"]
    assert "call wake_up" in driver.call(ResumeCall(5)).error
    if first == "weights":
        assert driver.call(UpdateWeightsCall(6, "/7")).result == {"version": 1}
    driver.turn(3)
    assert num_tokens(driver) == num_before
    driver.call(WakeCall(7, parts=(second,)))
    assert not driver.call(StatsCall(8)).result["is_sleeping"]
    driver.run()
    if first == "kv_cache":
        driver.check()
    else:
        assert {version for received in driver.received.values() for version in received.versions} <= {0, 1}
        assert all(received.versions[-1] == 1 for received in driver.received.values())


def test_what_woke_sleeps_again():
    driver = under_load()
    memory = driver.runner.pool.numel() * 8
    assert driver.call(SleepCall(1, level=2)).result == {"freed_bytes": 1000 + memory}
    driver.call(WakeCall(2, parts=("weights",)))
    assert driver.call(SleepCall(3, level=2)).result == {"freed_bytes": 1000}
    driver.call(WakeCall(4, parts=("kv_cache",)))
    assert driver.call(SleepCall(5, level=2)).result == {"freed_bytes": memory}
    driver.call(WakeCall(6))
    driver.run()
    assert not driver.core.has_work


def test_versions_grow():
    driver = under_load()
    assert driver.call(UpdateWeightsCall(1, "/7", version=5)).result == {"version": 5}
    for call_id, version in ((2, 5), (4, 0)):
        answer = driver.call(UpdateWeightsCall(call_id, "/8", version=version))
        assert (answer.error, answer.kind) == (f"version is {version}; allowed: more than 5", "RequestError")
    assert driver.call(UpdateWeightsCall(3, "/8")).result == {"version": 6}


def check_versions(driver, numbers: dict[int, int]) -> None:
    """Every token is what the weights of its version draw after those before it. `numbers`: of weights, by version."""
    for received in driver.received.values():
        value = hashes(received.ask.prompt_ids)[-1]
        for token_id, version in zip(received.token_ids, received.versions, strict=True):
            assert token_id == drawn(value, received.seed, numbers[version], driver.vocab_size)
            value = extended(value, token_id)
        assert received.versions == sorted(received.versions)


@AHEAD
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_weights_change_between_two_steps(launch_ahead, policy):
    driver = under_load(launch_ahead)
    driver.weights.at_once = False
    driver.core.receive(UpdateWeightsCall(1, "/7", policy=policy))
    driver.turn(4)
    assert driver.runner.weights.number == 0, "nothing is replaced before all is read"
    assert 1 not in driver.answers
    driver.weights.finish(Path("/7"))
    driver.turn()
    assert driver.answers[1].result == {"version": 1}
    late = driver.ask(9, max_tokens=5)
    driver.turn(8)
    driver.weights.at_once = True
    assert driver.call(UpdateWeightsCall(2, "/9", policy=policy, version=40)).result == {"version": 40}
    driver.run()
    check_versions(driver, {0: 0, 1: 7, 40: 9})
    seen = {version for received in driver.received.values() for version in received.versions}
    assert {0, 1} <= seen
    assert all(received.reason == "length" for received in driver.received.values())
    assert driver.received[late[0]].versions[-1] > 0
    driver.check_empty()


def test_weights_change_and_abort():
    driver = under_load()
    assert driver.call(UpdateWeightsCall(1, "/7", policy="abort")).result == {"version": 1}
    assert all(received.reason == "abort" for received in driver.received.values())
    (late,) = driver.ask(9)
    driver.run()
    assert driver.received[late].token_ids == driver.expected(late, weights=7)
    driver.check_empty()


def test_weights_change_while_paused():
    driver = under_load()
    driver.call(PauseCall(1))
    driver.call(UpdateWeightsCall(2, "/7"))
    driver.call(ResumeCall(3))
    driver.run()
    check_versions(driver, {0: 0, 1: 7})


def test_damaged_weights_change_nothing():
    driver = under_load()
    answer = driver.call(UpdateWeightsCall(1, "/broken"))
    assert (answer.error, answer.kind) == ("/broken is damaged", "CheckpointError")
    driver.run()
    driver.check()
    assert driver.core.weights.version == 0


def test_an_update_that_fails_otherwise_is_answered():
    driver = under_load()
    driver.weights.at_once = False
    driver.core.receive(UpdateWeightsCall(1, "/7"))
    driver.turn()
    driver.weights.staging.set_exception(MemoryError("no memory"))
    driver.run()
    assert driver.answers[1].error == "MemoryError: no memory"
    driver.check()


def test_pages_of_former_weights_are_never_found_again():
    driver = CoreDriver()
    prompt = driver.prompt(20)
    driver.ask(prompt)
    driver.run()
    driver.call(UpdateWeightsCall(1, "/7"))
    driver.ask(prompt)
    driver.run()
    driver.call(UpdateWeightsCall(2, "/0"))
    driver.ask(prompt)
    driver.run()
    assert [driver.received[i].num_cached for i in range(3)] == [0, 0, 0]


def test_calls_are_served_in_order():
    driver = under_load()
    driver.weights.at_once = False
    for call in (UpdateWeightsCall(1, "/7"), PauseCall(2), SleepCall(3), WakeCall(4), ResumeCall(5), ResetCacheCall(6)):
        driver.core.receive(call)
    driver.turn(3)
    assert not driver.answers
    assert driver.call(StatsCall(7)).error is None, "figures wait for nobody"
    driver.weights.finish(Path("/7"))
    driver.run()
    assert list(driver.answers) == [7, 1, 2, 3, 4, 5, 6]
    check_versions(driver, {0: 0, 1: 7})


def test_reset_forgets_prefixes():
    driver = CoreDriver()
    prompt = driver.prompt(20)
    for number in range(3):
        driver.ask(prompt)
        driver.run()
        if number == 1:
            driver.call(ResetCacheCall(1))
    assert [driver.received[i].num_cached for i in range(3)] == [0, 16, 0]
