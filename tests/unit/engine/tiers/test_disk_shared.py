"""Several processes on one directory, and processes that die in the middle of a write."""

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from glm5.engine.tiers import pagefile
from glm5.engine.tiers.disk import DiskTier
from glm5.engine.tiers.pagefile import checksum_of, file_bytes
from tests.unit.engine.tiers.pages import LAYOUT, PATIENCE_S, content_of, has, key_of, put

REPO = Path(__file__).parents[4]
FILE_BYTES = file_bytes(LAYOUT)
STAGES = ["before", "content", "rename"]
# One process that imports torch once and forks the others. It prints how each of them ended.
SCRIPT = """
import os, random, signal, sys, traceback
from pathlib import Path
from glm5.engine.tiers import pagefile
from glm5.engine.tiers.disk import DiskTier
from tests.unit.engine.tiers.pages import LAYOUT, has, put

FILE_BYTES = pagefile.file_bytes(LAYOUT)

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def killed(directory, stage):
    disk, write = DiskTier(directory, 100 * FILE_BYTES, LAYOUT), os.write
    assert put(disk, 0)

    def half(descriptor, rest):
        if len(rest) < LAYOUT.num_bytes:
            return write(descriptor, rest)
        write(descriptor, rest[: len(rest) // 2])
        die()

    if stage == "before":
        pagefile._write_all = die
    elif stage == "content":
        pagefile.os.write = half
    else:
        Path.replace = die
    put(disk, 1)

def working(directory, seed):  # `has` fails on a wrong content
    rng, disk, hits = random.Random(seed), DiskTier(directory, 12 * FILE_BYTES, LAYOUT), 0
    os.write(there, b"x")
    assert os.read(begin, 1) == b"x"
    for _ in range(600):
        number = rng.randrange(30)
        hits += has(disk, number) or not put(disk, number)
    assert disk.is_writable and not disk.num_damaged
    assert hits > 50, hits

def fork(work, *args):
    if (pid := os.fork()) == 0:
        signal.alarm(20)  # a hang ends
        try:
            work(*args)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid

root = sys.argv[1]
(arrivals, there), (begin, go) = os.pipe(), os.pipe()
pids = [fork(killed, root + "/" + stage, stage) for stage in sys.argv[2:]]
pids += [fork(working, root + "/shared", seed) for seed in range(2)]
for _ in range(2):
    assert os.read(arrivals, 1) == b"x"
os.write(go, b"xx")
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
"""


@pytest.fixture(scope="module")
def after(tmp_path_factory) -> tuple[Path, list[int]]:
    """Directories that processes left behind, and how those ended."""
    root = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-c", SCRIPT, str(root), *STAGES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return root, [int(code) for code in done.stdout.split()]


def tier(directory, num_files: int) -> DiskTier:
    return DiskTier(directory, num_files * FILE_BYTES, LAYOUT)


def size(directory) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("stage", STAGES)
def test_a_process_killed_in_the_middle_of_a_write_leaves_no_wrong_page(after, stage):
    directory, codes = after[0] / stage, after[1][: len(STAGES)]
    assert codes == [-signal.SIGKILL] * len(STAGES)
    assert len(list(directory.rglob("*.part"))) == 1, "it died elsewhere"
    disk = tier(directory, 100)
    assert has(disk, 0)
    assert key_of(1) not in disk
    assert not has(disk, 1)
    assert put(disk, 1)
    assert has(disk, 1)


def test_two_processes_share_a_directory(after):
    directory, codes = after[0] / "shared", after[1][len(STAGES) :]
    assert codes == [0, 0]
    assert list(directory.rglob("*.part")) == []
    assert size(directory) <= 14 * FILE_BYTES
    disk = tier(directory, 12)
    assert size(directory) == disk.num_bytes
    assert sum(has(disk, i) for i in range(30)) == len(disk) > 5


def test_pages_of_one_are_hits_of_the_other(tmp_path):
    ours, theirs = tier(tmp_path, 10), tier(tmp_path, 10)
    put(theirs, 0)
    assert not ours.holds(key_of(0).digest)
    assert key_of(0) in ours
    assert has(ours, 0)
    assert len(ours) == 1


def test_the_other_ones_files_count_and_are_evicted_in_order_of_use(tmp_path):
    ours, theirs = tier(tmp_path, 6), tier(tmp_path, 6)
    for i in range(0, 6, 2):
        put(ours, i)
        put(theirs, i + 1)
    assert has(theirs, 0)
    for i in range(6, 9):
        put(ours, i)
    assert size(tmp_path) == 6 * FILE_BYTES
    assert [i for i in range(9) if has(theirs, i)] == [0, 4, 5, 6, 7, 8]
    assert theirs.num_damaged == 0


def test_a_file_that_comes_while_its_folder_is_listed_is_not_forgotten(tmp_path, monkeypatch):
    disk = tier(tmp_path, 10)
    assert put(disk, 0)
    number = next(i for i in range(1, 9999) if key_of(i).digest[0] == key_of(0).digest[0])
    listing, name, content = disk._folder.listing, disk._name(key_of(number).digest), content_of(number)

    def finish_a_write_after_listing(where):
        found = listing(where)
        disk._write(name, key_of(number), content, checksum_of(content), disk._stamp())
        disk._folder.used(name, FILE_BYTES, disk._stamp())
        return found

    monkeypatch.setattr(disk._folder, "listing", finish_a_write_after_listing)
    disk._refresh(FILE_BYTES)
    assert disk.holds(key_of(number).digest)
    assert disk.num_bytes == size(tmp_path) == 2 * FILE_BYTES


def test_two_threads_write_the_same_page(tmp_path, monkeypatch):
    disk, results = tier(tmp_path, 10), []
    write_all, gate, arrived = pagefile._write_all, threading.Event(), threading.Event()

    def slow(descriptor, pieces):
        header, content = pieces
        write_all(descriptor, (header, content[:100]))
        arrived.set()
        assert gate.wait(PATIENCE_S)
        write_all(descriptor, (content[100:],))

    monkeypatch.setattr(pagefile, "_write_all", slow)
    first = threading.Thread(target=lambda: results.append(put(disk, 0)))
    first.start()
    assert arrived.wait(PATIENCE_S)
    monkeypatch.undo()
    assert put(disk, 0)
    assert has(disk, 0)
    gate.set()
    first.join(PATIENCE_S)
    assert results == [True]
    assert has(disk, 0)
    assert disk.is_writable
    assert disk.num_bytes == size(tmp_path) == FILE_BYTES


@pytest.mark.parametrize("num_tiers", [1, 3])
def test_threads_keep_the_bound_and_the_books(tmp_path, seed, num_tiers):
    tiers = [tier(tmp_path, 10) for _ in range(num_tiers)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng, disk = random.Random(seed + number), tiers[number % num_tiers]
        try:
            for _ in range(150):
                page = rng.randrange(25)
                assert has(disk, page) or put(disk, page) or not disk.num_damaged
                if num_tiers == 1:
                    assert disk.num_bytes <= 10 * FILE_BYTES
        except BaseException as error:  # noqa: BLE001  (shown by the test)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not errors
    assert all(disk.is_writable and not disk.num_damaged for disk in tiers)
    restarted = tier(tmp_path, 100)
    assert restarted.num_bytes == size(tmp_path)
    if num_tiers == 1:
        assert tiers[0].num_bytes == size(tmp_path) <= 10 * FILE_BYTES
