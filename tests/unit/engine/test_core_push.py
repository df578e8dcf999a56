"""Weights that come in buckets, under load: nothing is computed while they are torn, whatever goes wrong midway."""

from concurrent.futures import Future

import pytest

from glm5.engine.transport.wire import (
    Bucket,
    Leave,
    PauseCall,
    PushCall,
    PushedTensor,
    ResumeCall,
    SleepCall,
    StatsCall,
    UpdateWeightsCall,
    WakeCall,
    first_id,
)
from tests.support.core_driver import CoreDriver
from tests.support.fake_runner import ended
from tests.unit.engine.test_core_control import check_versions, num_tokens, under_load

WRONG = 5  # a checksum


def push(call_id: int, *names: str, **options) -> PushCall:
    """A bucket for each name."""
    return PushCall(call_id, 0, (0, 1), [[PushedTensor(name, "F32", (1,), 0, 4)] for name in names], **options)


def is_stopped(driver: CoreDriver) -> bool:
    """Whether requests wait, without spinning."""
    driver.run()
    return driver.received[0].reason is None and not driver.core.has_work


@pytest.fixture(params=[True, False], ids=["ahead", "not ahead"])
def driver(request):
    return under_load(request.param)


def tear(driver: CoreDriver, says: str, **bucket) -> None:
    """By a push that fails at its second bucket."""
    driver.core.receive(push(10, "7", "7"))
    assert driver.call(Bucket(11, 10)).error is None
    answer = driver.call(Bucket(12, 10, **bucket))
    assert (answer.kind, answer.error) == ("CheckpointError", "the push has ended")
    assert says in driver.answers[10].error
    assert "requests wait until a push of all tensors or a folder with all has arrived" in driver.answers[10].error
    assert is_stopped(driver)
    assert driver.call(StatsCall(13)).result["weights_are_torn"]


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort"])
def test_requests_wait_from_the_first_bucket_to_the_last(driver, policy):
    driver.core.receive(push(1, "7", "7", "7", policy=policy))
    count = num_tokens(driver)
    driver.turn(4)
    assert num_tokens(driver) > count
    driver.call(Bucket(2, 1))
    assert is_stopped(driver)
    late, count = driver.ask(5), num_tokens(driver)
    driver.call(Bucket(3, 1))
    assert is_stopped(driver)
    assert num_tokens(driver) == count
    driver.call(Bucket(4, 1))
    driver.run()
    assert driver.answers[1].result == {"version": 1}
    check_versions(driver, {0: 0, 1: 7})
    ends = {received.reason for seq_id, received in driver.received.items() if seq_id not in late}
    assert ends == {"abort" if policy == "abort" else "length"}
    stats = driver.call(StatsCall(5)).result
    assert not stats["weights_are_torn"]
    assert stats["last_push"]["seconds"] > stats["last_push"]["stopped_seconds"] > 0
    assert stats["last_push"]["bytes"] == 12


def test_a_bucket_is_checked_while_the_one_before_is_written(driver, monkeypatch):
    weights, written, calls = driver.core.control.weights, Future(), list[str]()
    monkeypatch.setattr(weights, "check_sum", lambda number, _: calls.append(f"check {number}") or ended(None))
    monkeypatch.setattr(weights, "write", lambda number: calls.append(f"write {number}") or written)
    for message in (push(1, "7", "7", "7"), Bucket(2, 1), Bucket(3, 1)):
        driver.core.receive(message)
    driver.turn(8)
    assert calls == ["check 0", "write 0", "check 1"]
    written.set_result(None)
    driver.core.receive(Bucket(4, 1))
    driver.run()
    assert calls == ["check 0", "write 0", "check 1", "write 1", "check 2", "write 2"]
    assert driver.answers[1].result == {"version": 1}


@pytest.mark.parametrize("wrong", [{"checksum": WRONG}, {"error": "it is tired"}])
def test_a_push_that_fails_before_anything_is_written_changes_nothing(driver, wrong):
    """The control of the tests below."""
    driver.core.receive(push(1, "7", "7"))
    driver.call(Bucket(2, 1, **wrong))
    assert "wait" not in driver.answers[1].error
    assert "x is no number" in driver.call(push(3, "x")).error
    driver.run()
    driver.check()
    assert not driver.call(StatsCall(4)).result["weights_are_torn"]


@pytest.mark.parametrize(
    ("says", "bucket"),
    [("bucket 1 has a wrong checksum", {"checksum": WRONG}), ("the sender of the weights stopped: x", {"error": "x"})],
)
@pytest.mark.parametrize("by", ["push", "folder", "sleep"])
def test_nothing_is_computed_with_weights_of_two_versions(driver, says, bucket, by):
    tear(driver, says, **bucket)
    count = num_tokens(driver)
    driver.call(PauseCall(20))
    driver.call(ResumeCall(21))
    driver.call(SleepCall(22))
    driver.call(WakeCall(23))
    assert "has only some tensors" in driver.call(push(24, "8", "some")).error
    assert is_stopped(driver)
    assert num_tokens(driver) == count
    if by == "push":
        driver.core.receive(push(25, "8"))
        driver.call(Bucket(26, 25))
    elif by == "folder":
        driver.call(UpdateWeightsCall(25, "/8"))
    else:
        driver.call(SleepCall(25, level=2))
        driver.call(WakeCall(26))
    driver.run()
    check_versions(driver, {0: 0, 1: 8})
    assert {received.reason for received in driver.received.values()} == {"length"}


def test_a_push_of_a_client_that_ends_fails():
    driver = under_load()
    call_id = first_id(3)
    driver.core.receive(push(call_id, "7", "7"))
    driver.call(Bucket(call_id + 1, call_id))
    driver.core.receive(Leave(3))
    driver.turn()
    assert "the sender of the weights stopped: it has ended" in driver.answers[call_id].error
    assert is_stopped(driver)


def test_calls_wait_for_a_push_and_a_pause_outlasts_it():
    driver = under_load()
    driver.call(PauseCall(1))
    driver.core.receive(push(2, "7"))
    driver.core.receive(SleepCall(3))
    driver.turn(4)
    assert 3 not in driver.answers
    driver.call(Bucket(4, 2))
    assert driver.call(WakeCall(5)).error is None
    assert driver.answers[2].result == {"version": 1}
    assert is_stopped(driver)
    driver.call(ResumeCall(6))
    driver.run()
    check_versions(driver, {0: 0, 1: 7})
    assert driver.call(Bucket(7, 2)).error == "the push has ended"


def test_a_push_is_refused_while_the_weights_sleep():
    driver = under_load()
    driver.call(SleepCall(1))
    driver.core.receive(Bucket(3, 2))
    assert driver.call(push(2, "7")).error.startswith("the engine sleeps")
    driver.call(WakeCall(4))
    driver.run()
    driver.check()
