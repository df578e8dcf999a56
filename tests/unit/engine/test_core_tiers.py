"""Pages behind the device: found again, never wrong, and no disk can hold up or end the engine."""

import errno
import threading

import pytest

from glm5.engine.cache.prefix import cache_salt, page_keys
from glm5.engine.core import tiering
from glm5.engine.scheduler.config import RestoreCost
from glm5.engine.tiers import disk as disk_tier
from glm5.engine.transport.wire import AbortRequests, ResetCacheCall
from tests.support.core_driver import CoreDriver

PATIENCE_S = 30.0
FREE = RestoreCost(host_page=0, disk_page=0, fixed=0)


@pytest.fixture
def make():
    """Drivers, closed in the end."""
    drivers = []

    def make_driver(**options) -> CoreDriver:
        drivers.append(CoreDriver(**{"num_pages": 12, "max_model_len": 44, "restore_cost": FREE} | options))
        return drivers[-1]

    yield make_driver
    for driver in drivers:
        driver.core.close(PATIENCE_S)


def fill(driver, number: int) -> None:
    """Answer another prompt of ten pages, so that nothing else is left on the device."""
    driver.ask(driver.prompt(40, 50 + number), max_tokens=2)
    run(driver)


def run(driver) -> None:
    """Copies take real time; the driver's turns are bounded."""
    while driver.core.has_work:
        driver.num_turns = 0
        driver.turn()


def again(driver, num_tokens: int = 30) -> int:
    """Ask for the first prompt; how many of its tokens were found."""
    (seq_id,) = driver.ask(driver.prompt(num_tokens), max_tokens=5)
    run(driver)
    driver.check(seq_id)
    return driver.received[seq_id].num_cached


def test_evicted_pages_come_back_from_the_host(make):
    driver = make(tiers=True)
    assert again(driver) == 0
    assert again(driver) == 28
    fill(driver, 1)
    assert again(driver) == 28
    figures = driver.core.stats()
    assert figures["prefix_cache"]["hit_tokens"]["host"] >= 24
    assert figures["tiers"]["loaded_from_host"] >= 6
    driver.check_empty()


def test_pages_come_back_from_disk_after_a_restart(make, tmp_path):
    first = make(tiers=tmp_path)
    again(first)
    first.core.close(PATIENCE_S)
    second = make(tiers=tmp_path)
    assert again(second) == 28
    assert second.core.stats()["prefix_cache"]["hit_tokens"]["disk"] == 28


def test_a_process_finds_what_another_wrote_meanwhile(make, tmp_path):
    first, second = make(tiers=tmp_path), make(tiers=tmp_path)
    again(first)
    assert first.copies.flush(PATIENCE_S)
    assert again(second) == 28


def test_pages_of_other_weights_are_not_found(make, tmp_path):
    first = make(tiers=tmp_path)
    again(first)
    first.core.close(PATIENCE_S)
    second = make(tiers=tmp_path)
    second.core.scheduler.page_manager.weights = b"other"
    assert again(second) == 0


def test_pages_of_another_tenant_are_not_found(make, tmp_path):
    driver = make(tiers=tmp_path)
    again(driver)
    driver.ask(driver.prompt(30), salt=b"b")
    run(driver)
    assert driver.received[1].num_cached == 0


def test_damaged_files_are_misses(make, tmp_path):
    first = make(tiers=tmp_path)
    again(first)
    first.core.close(PATIENCE_S)
    files = sorted(tmp_path.rglob("*.page"))
    assert len(files) >= 7
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content if number % 2 else content[:-20])
    second = make(tiers=tmp_path)
    assert again(second) == 0
    assert second.core.stats()["tiers"]["disk_damaged"] > 0
    found = second.core.stats()["prefix_cache"]
    assert (found["query_tokens"], found["hit_tokens"]) == (30, {"device": 0, "host": 0, "disk": 0})
    assert found["missed_tokens"] == 30


def test_pages_behind_a_damaged_one_are_no_hits(make, tmp_path):
    first = make(tiers=tmp_path)
    again(first)
    key = list(page_keys(first.prompt(30), 4, cache_salt(first.weights.identity, b"")))[3]
    first.core.close(PATIENCE_S)
    (file,) = tmp_path.rglob(f"{key.digest.hex()}.page")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    second = make(tiers=tmp_path)
    assert again(second) == 12
    assert second.core.stats()["prefix_cache"]["hit_tokens"] == {"device": 0, "host": 0, "disk": 12}
    assert second.core.stats()["tiers"]["disk_damaged"] == 1


def test_a_full_disk_costs_files_only(make, tmp_path, monkeypatch):
    def is_full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_tier, "write_page_file", is_full)
    driver = make(tiers=tmp_path)
    again(driver)
    fill(driver, 1)
    assert again(driver) == 28
    assert driver.core.stats()["tiers"]["disk_is_writable"] == 0


def test_a_disk_that_hangs_in_a_load(make, tmp_path, monkeypatch):
    first = make(tiers=tmp_path)
    again(first)
    first.core.close(PATIENCE_S)
    monkeypatch.setattr(tiering, "COPY_DEADLINE_S", 0.05)
    second, gate = make(tiers=tmp_path), threading.Event()
    read = second.copies.disk.read

    def hang(key, content):
        assert gate.wait(PATIENCE_S)
        return read(key, content)

    monkeypatch.setattr(second.copies.disk, "read", hang)
    assert again(second) == 0
    fill(second, 1)
    gate.set()
    assert second.copies.flush(PATIENCE_S)
    fill(second, 2)
    assert again(second) == 28


def test_a_disk_that_hangs_in_a_lookup(make, tmp_path, monkeypatch):
    driver, gate = make(tiers=tmp_path), threading.Event()
    monkeypatch.setattr(tiering, "LOOKUP_DEADLINE_S", 0.05)
    lookup = driver.copies.lookup

    def hang(keys):
        assert gate.wait(PATIENCE_S)
        return lookup(keys)

    monkeypatch.setattr(driver.copies, "lookup", hang)
    assert again(driver) == 0
    # Nobody waits for a disk that is known to hang.
    driver.ask(driver.prompt(20, 3))
    driver.turn()
    assert driver.core.scheduler.live
    gate.set()
    run(driver)
    driver.check()


@pytest.mark.parametrize("left", [(), (1,)])
def test_an_abort_while_pages_are_looked_for(make, tmp_path, monkeypatch, left):
    driver, gate = make(tiers=tmp_path), threading.Event()
    monkeypatch.setattr(tiering, "LOOKUP_DEADLINE_S", PATIENCE_S)
    lookup = driver.copies.lookup

    def hang(keys):
        assert gate.wait(PATIENCE_S)
        return lookup(keys)

    monkeypatch.setattr(driver.copies, "lookup", hang)
    ids = driver.ask(driver.prompt(30), n=2)
    driver.turn(3)
    assert not driver.core.scheduler.live
    driver.core.receive(AbortRequests(tuple(seq_id for seq_id in ids if seq_id not in left)))
    driver.turn()
    assert driver.received[0].reason == "abort"
    gate.set()
    run(driver)
    assert [driver.received[seq_id].reason for seq_id in ids] == ["length" if i in left else "abort" for i in ids]
    for seq_id in left:
        driver.check(seq_id)
    driver.check_empty()


def test_an_abort_while_pages_are_loaded(make, tmp_path, monkeypatch):
    first = make(tiers=tmp_path)
    again(first)
    first.core.close(PATIENCE_S)
    monkeypatch.setattr(tiering, "COPY_DEADLINE_S", 0.5)
    driver, gate = make(tiers=tmp_path), threading.Event()
    read = driver.copies.disk.read

    def wait(key, content):
        assert gate.wait(PATIENCE_S)
        return read(key, content)

    monkeypatch.setattr(driver.copies.disk, "read", wait)
    (seq_id,) = driver.ask(driver.prompt(30))
    while not driver.core.scheduler.prompting:
        driver.turn()
    assert driver.core.scheduler.prompting[0].restore is not None
    driver.core.receive(AbortRequests((seq_id,)))
    fill(driver, 1)
    assert driver.received[seq_id].reason == "abort"
    gate.set()
    run(driver)
    assert driver.received[1].token_ids == driver.expected(1)
    driver.check_empty()


def test_a_queue_that_takes_nothing(make, tmp_path):
    first = make(tiers=tmp_path)
    again(first)
    first.core.close(PATIENCE_S)
    second = make(tiers=tmp_path)
    second.copies.max_in_flight = 0
    assert again(second) == 0
    assert second.core.stats()["tiers"]["refused"] > 0
    second.copies.max_in_flight = 64


def test_pages_that_cannot_be_copied_end_the_engine(make, monkeypatch):
    driver = make(tiers=True)

    def fail(*args):
        raise ValueError("the device is gone")

    monkeypatch.setattr(driver.copies._io, "read_page", fail)
    with pytest.raises(RuntimeError, match="copying a page failed"):
        again(driver)


def test_reset_forgets_every_tier(make, tmp_path):
    driver = make(tiers=tmp_path)
    again(driver)
    assert driver.copies.flush(PATIENCE_S)
    assert list(tmp_path.rglob("*.page"))
    assert driver.call(ResetCacheCall(1)).error is None
    assert not list(tmp_path.rglob("*.page"))
    assert again(driver) == 0
    assert again(driver) == 28


def test_reset_under_load(make, tmp_path):
    driver = make(tiers=tmp_path)
    for number in range(6):
        driver.ask(driver.prompt(20, number % 2), max_tokens=12, seed=number)
    for number in range(5):
        driver.turn(3)
        driver.call(ResetCacheCall(number))
    run(driver)
    driver.check()
    driver.check_empty()
