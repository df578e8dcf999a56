"""The queue gives pages back as they were, reports every copy once, and neither memory nor disk can hold it up."""

import errno
import logging
import os
import threading

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.engine.tiers import pagefile
from glm5.engine.tiers.copies import CopyQueue
from glm5.engine.tiers.disk import DiskTier
from glm5.engine.tiers.host import HostTier
from glm5.engine.tiers.pagefile import file_bytes
from tests.unit.engine.tiers.pages import LAYOUT, PATIENCE_S, Device, content_of, key_of


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def make(device, tmp_path):
    """Queues over the device, all closed in the end, with no block still in somebody's hands."""
    queues = []

    def make_queue(num_blocks: int = 8, num_files: int | None = None, directory=tmp_path, **options) -> CopyQueue:
        disk = DiskTier(directory, num_files * file_bytes(LAYOUT), LAYOUT) if num_files else None
        queues.append(CopyQueue(device, HostTier(num_blocks * LAYOUT.num_bytes, LAYOUT), disk, **options))
        return queues[-1]

    yield make_queue
    device.gate.set()
    for queue in queues:
        queue.close(PATIENCE_S)
        assert queue.flush(0)
        assert queue.host.num_leased == 0
        assert not any(worker.is_alive() for worker in queue._workers)


def ended(queue: CopyQueue, *handles: int) -> dict[int, str | None]:
    """Waits until these copies have ended; their tiers."""
    tiers: dict[int, str | None] = {}
    while set(handles) - tiers.keys():
        copies = queue.done(PATIENCE_S)
        assert copies, f"copies {set(handles) - tiers.keys()} were never reported"
        for copy in copies:
            assert copy.handle not in tiers, "reported twice"
            tiers[copy.handle] = copy.tier
    return tiers


def copy(queue: CopyQueue, kind: str, number: int, page_id: int) -> str | None:
    handle = getattr(queue, kind)(key_of(number), page_id)
    return ended(queue, handle)[handle]


def test_a_page_comes_back_from_the_host(make, device):
    queue = make()
    assert copy(queue, "store", 1, 3) == "host"
    device.pages[3] = 0
    assert copy(queue, "load", 1, 5) == "host"
    assert torch.equal(device.pages[5], content_of(1003))
    assert copy(queue, "load", 2, 0) is None
    assert queue.stats() | {"stored": 1, "loaded_from_host": 1, "missed": 1, "host_pages": 1} == queue.stats()


def test_a_page_comes_back_from_the_disk_after_a_restart(make, device):
    first = make(num_files=10)
    for i in range(5):
        assert copy(first, "store", i, i) == "host"
    assert first.flush(PATIENCE_S)
    first.close()
    second = make(num_files=10)
    assert second.lookup([key_of(i) for i in (0, 1, 9, 2)]) == ["disk", "disk"]
    for i in range(5):
        assert copy(second, "load", i, 7) == "disk"
        assert torch.equal(device.pages[7], content_of(1000 + i))
        assert copy(second, "load", i, 6) == "host", "what came from disk stays in memory"
    assert second.lookup([key_of(0)]) == ["host"]


def test_what_leaves_the_host_is_found_on_disk(make, device):
    queue = make(num_blocks=4, num_files=100)
    for i in range(8):
        assert copy(queue, "store", i, i) == "host"
        assert queue.flush(PATIENCE_S)
    assert queue.moved() == [(key_of(i).digest, "disk") for i in range(4)]
    assert queue.moved() == []
    assert [copy(queue, "load", i, 0) for i in range(8)] == ["disk"] * 8  # in this order each load evicts the next


def test_what_leaves_both_is_reported_gone(make):
    queue = make(num_blocks=3, num_files=3)
    for i in range(5):
        copy(queue, "store", i, i)
        assert queue.flush(PATIENCE_S)
    assert sorted(queue.moved()) == sorted((key_of(i).digest, None) for i in range(2))


def test_a_page_that_is_kept_is_not_copied_again(make, device):
    queue = make(num_files=4)
    assert copy(queue, "store", 1, 1) == "host"
    assert copy(queue, "store", 1, 2) == "host"
    assert device.num_reads == 1


def test_a_store_is_reported_before_its_file_is_written(make, device, monkeypatch):
    queue, gate = make(num_files=4), threading.Event()
    write_all = pagefile._write_all

    def slow(*args):
        assert gate.wait(PATIENCE_S)
        write_all(*args)

    monkeypatch.setattr(pagefile, "_write_all", slow)
    assert copy(queue, "store", 1, 1) == "host"
    assert not queue.flush(0)
    assert copy(queue, "load", 1, 2) == "host"
    gate.set()
    assert queue.flush(PATIENCE_S)
    assert len(queue.disk) == 1


def test_a_disk_that_lags_costs_files_not_stores(make, monkeypatch):
    queue, gate = make(num_blocks=5, num_files=100), threading.Event()
    write_all = pagefile._write_all

    def slow(*args):
        assert gate.wait(PATIENCE_S)
        write_all(*args)

    monkeypatch.setattr(pagefile, "_write_all", slow)
    assert [copy(queue, "store", i, i % 8) for i in range(20)] == ["host"] * 20
    assert queue.counts.unwritten == 17  # 5 blocks less 2 threads may wait
    gate.set()
    assert queue.flush(PATIENCE_S)
    assert len(queue.disk) == 3
    assert copy(queue, "load", 0, 0) in ("host", "disk")


def test_loads_overtake_stores(make, device):
    queue = make(num_workers=1)
    assert copy(queue, "store", 1, 1) == "host"
    device.gate.clear()
    device.arrived.clear()
    handles = [queue.store(key_of(i), i) for i in range(2, 6)]
    assert device.arrived.wait(PATIENCE_S)
    load = queue.load(key_of(1), 0)
    device.gate.set()
    order = list(ended(queue, load, *handles))
    assert order == [handles[0], load, *handles[1:]]


def test_copies_in_flight_are_bounded(make, device):
    queue = make(max_in_flight=3)
    device.gate.clear()
    handles = [queue.store(key_of(i), i) for i in range(5)]
    assert handles[3:] == [None, None]
    assert queue.counts.refused == 2
    device.gate.set()
    assert set(ended(queue, *handles[:3]).values()) == {"host"}
    assert queue.store(key_of(9), 1) is not None


def test_a_copy_that_waits_is_cancelled_at_once_and_its_page_left_alone(make, device):
    queue = make(num_workers=1)
    copy(queue, "store", 1, 1)
    device.gate.clear()
    device.arrived.clear()
    running = queue.store(key_of(2), 2)
    assert device.arrived.wait(PATIENCE_S)
    load, store = queue.load(key_of(1), 5), queue.store(key_of(3), 3)
    for handle in (load, store, running, 12345):
        queue.cancel(handle)
    assert [(done.handle, done.ok) for done in queue.done()] == [(load, False), (store, False)]
    device.gate.set()
    assert ended(queue, running) == {running: "host"}, "its page was in hand: it ended by itself"
    assert queue.flush(PATIENCE_S)
    assert torch.equal(device.pages[5], content_of(1005))
    assert queue.done() == []
    assert queue.counts.cancelled == 2


def test_a_load_from_a_disk_that_hangs_can_be_cancelled(make, device, monkeypatch):
    first = make(num_files=4)
    copy(first, "store", 1, 1)
    assert first.flush(PATIENCE_S)
    queue, arrived, gate = make(num_files=4), threading.Event(), threading.Event()
    readv = os.readv

    def hanging(*args):
        arrived.set()
        assert gate.wait(PATIENCE_S)
        return readv(*args)

    monkeypatch.setattr(pagefile.os, "readv", hanging)
    handle = queue.load(key_of(1), 5)
    assert arrived.wait(PATIENCE_S)
    queue.cancel(handle)
    assert [(done.handle, done.ok) for done in queue.done()] == [(handle, False)]
    gate.set()
    assert queue.flush(PATIENCE_S)
    assert torch.equal(device.pages[5], content_of(1005)), "the page is another's by now"


@pytest.mark.parametrize("kind", ["store", "load"])
def test_an_exception_of_the_device_reaches_the_engine(make, device, kind):
    queue = make()
    copy(queue, "store", 1, 1)
    device.fails = True
    handle = getattr(queue, kind)(key_of(1 if kind == "load" else 2), 2)
    assert handle is not None
    assert queue.flush(PATIENCE_S)
    with pytest.raises(RuntimeError, match="copying a page failed: ValueError"):
        queue.done()
    assert key_of(2) not in queue.host


def test_damage_in_memory_is_a_miss_or_found_on_disk(make, device, caplog):
    queue = make(num_files=4)
    for on_disk in (True, False):
        copy(queue, "store", 1, 1)
        assert queue.flush(PATIENCE_S)
        block = queue.host.lease(key_of(1))
        block.content[7] ^= 1
        queue.host.release(block)
        if not on_disk:
            next(queue.disk.directory.rglob("*.page")).unlink()
        assert copy(queue, "load", 1, 2) == ("disk" if on_disk else None)
        assert torch.equal(device.pages[2], content_of(1001)), "from disk, and untouched by the miss"
    assert queue.counts.damaged == 2
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2


def test_a_damaged_file_is_a_miss_and_written_again_by_the_next_store(make, device):
    first = make(num_files=4)
    copy(first, "store", 1, 1)
    assert first.flush(PATIENCE_S)
    path = next(first.disk.directory.rglob("*.page"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    queue = make(num_files=4)
    assert queue.lookup([key_of(1)]) == ["disk"]
    assert copy(queue, "load", 1, 5) is None
    assert torch.equal(device.pages[5], content_of(1005))
    assert queue.lookup([key_of(1)]) == []
    copy(queue, "store", 1, 1)
    assert queue.flush(PATIENCE_S)
    assert len(queue.disk) == 1


def test_a_full_disk_leaves_the_host_tier_at_work(make, device, monkeypatch, caplog):
    queue = make(num_files=100)
    copy(queue, "store", 0, 0)
    assert queue.flush(PATIENCE_S)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pagefile, "_write_all", full)
    for i in range(1, 5):
        assert copy(queue, "store", i, i) == "host"
    assert queue.flush(PATIENCE_S)
    assert [copy(queue, "load", i, 7) for i in range(5)] == ["host"] * 5
    queue.host.clear()
    assert [copy(queue, "load", i, 7) for i in range(2)] == ["disk", None]
    assert queue.stats()["disk_is_writable"] == 0
    assert len([record for record in caplog.records if "no more pages" in record.getMessage()]) == 1


def test_closing_reports_what_had_not_begun_and_ends_the_threads(make, device):
    queue = make(num_workers=1, num_files=10)
    device.gate.clear()
    handles = [queue.store(key_of(i), i) for i in range(4)]
    assert device.arrived.wait(PATIENCE_S)
    queue.close(timeout_s=0)
    assert {copy.handle: copy.tier for copy in queue.done()} == dict.fromkeys(handles[1:])
    device.gate.set()
    queue.close(PATIENCE_S)
    assert not queue._workers[0].is_alive()
    assert {copy.handle: copy.tier for copy in queue.done()} == {handles[0]: "host"}


def test_closing_gives_up_files_that_wait_and_the_blocks_that_they_hold(make, monkeypatch):
    queue, gate = make(num_files=10), threading.Event()
    write_all = pagefile._write_all

    def slow(*args):
        assert gate.wait(PATIENCE_S)
        write_all(*args)

    monkeypatch.setattr(pagefile, "_write_all", slow)
    assert [copy(queue, "store", i, i) for i in range(4)] == ["host"] * 4
    queue.close(timeout_s=0)
    gate.set()
    queue.close(PATIENCE_S)
    assert len(queue.disk) <= 1
    assert queue.counts.unwritten == 4 - len(queue.disk)


def test_a_thread_that_hangs_is_left_behind(make, device, caplog):
    queue = make(num_workers=1)
    device.gate.clear()
    queue.store(key_of(1), 1)
    assert device.arrived.wait(PATIENCE_S)
    queue.close(timeout_s=0)
    assert "left behind" in caplog.text


def test_too_few_blocks_for_the_threads_are_refused_with_the_numbers(make):
    with pytest.raises(ConfigError, match=rf"room for 2 pages.*give at least {3 * LAYOUT.num_bytes} bytes"):
        make(num_blocks=2, num_workers=2)


def test_a_host_tier_of_a_few_blocks_is_enough_in_front_of_a_disk(make, device):
    queue = make(num_blocks=3, num_files=50)
    for i in range(20):
        assert copy(queue, "store", i, i % 8) == "host"
        assert queue.flush(PATIENCE_S)
    for i in range(20):
        assert copy(queue, "load", i, 0) is not None
    assert queue.counts.unwritten == 0
    assert queue.counts.loaded_from_disk >= 17


@pytest.mark.parametrize(("num_workers", "num_files"), [(1, None), (2, 15), (4, 15)])
def test_random_traffic_never_gives_a_wrong_page(make, device, rng, num_workers, num_files):
    """The device holds page n in every page that is said to hold n; the queue's pages are touched by nobody else."""
    queue = make(num_blocks=8, num_files=num_files, num_workers=num_workers, max_in_flight=4)
    holds: list[int | None] = [None] * 8
    busy: dict[int, tuple[int, int]] = {}
    reports = 0
    for _ in range(3000):
        idle = [page for page in range(8) if page not in {page for page, _ in busy.values()}]
        action, number = rng.choice(["compute", "store", "load", "load", "cancel", "poll"]), rng.randrange(25)
        if action == "compute" and idle:
            page = rng.choice(idle)
            device.pages[page], holds[page] = content_of(number), number
        elif action == "store" and (full := [page for page in idle if holds[page] is not None]):
            page = rng.choice(full)
            if (handle := queue.store(key_of(holds[page]), page)) is not None:
                busy[handle] = page, holds[page]
        elif action == "load" and idle:
            page = rng.choice(idle)
            if (handle := queue.load(key_of(number), page)) is not None:
                busy[handle], holds[page] = (page, number), None
        elif action == "cancel" and busy and rng.random() < 0.2:
            queue.cancel(rng.choice(list(busy)))
        for done in queue.done(PATIENCE_S if action == "poll" and busy else 0):
            reports += 1
            page, number = busy.pop(done.handle)
            if done.kind == "load" and done.ok:
                holds[page] = number
            if holds[page] is not None:
                assert torch.equal(device.pages[page], content_of(holds[page]))
    ended(queue, *busy)
    assert queue.flush(PATIENCE_S)
    counts = queue.counts
    assert counts.loaded_from_host > 50
    assert counts.loaded_from_disk > 20 or num_files is None
    assert counts.missed > 20
    assert counts.damaged == 0


def test_clearing_forgets_host_and_disk(make, device):
    queue = make(num_files=10)
    for number in (1, 2):
        assert copy(queue, "store", number, number) == "host"
    assert queue.flush(PATIENCE_S)
    queue.clear()
    assert queue.lookup([key_of(1)]) == []
    assert dict(queue.moved()) == {key_of(1).digest: None, key_of(2).digest: None}
    assert copy(queue, "load", 1, 0) is None
    assert copy(queue, "store", 1, 1) == "host"
