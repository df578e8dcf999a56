"""Pages in files: bounded, least recently used first out, also after a restart; whatever is wrong is a miss."""

import errno
import logging
import os
import resource
import time

import pytest

from glm5.common.errors import ConfigError
from glm5.engine.tiers import folder, pagefile
from glm5.engine.tiers.disk import DiskTier
from glm5.engine.tiers.key import PageKey
from glm5.engine.tiers.layout import PageLayout
from glm5.engine.tiers.pagefile import file_bytes
from tests.unit.engine.tiers.pages import LAYOUT, OTHER_LAYOUT, content_of, empty, has, key_of, put

FILE_BYTES = file_bytes(LAYOUT)


def tier(directory, num_files: int = 100, layout: PageLayout = LAYOUT) -> DiskTier:
    return DiskTier(directory, num_files * FILE_BYTES, layout)


def files(directory) -> list:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def size(directory) -> int:
    return sum(path.stat().st_size for path in files(directory))


def file_of(directory, number: int, layout: PageLayout = LAYOUT):
    digest = key_of(number).digest.hex()
    return directory / layout.fingerprint.hex() / digest[:2] / f"{digest}.page"


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_page_comes_back_also_after_a_restart(tmp_path):
    disk = tier(tmp_path / "a" / "b")
    assert all(put(disk, i) for i in range(20))
    for same in (disk, tier(tmp_path / "a" / "b")):
        assert len(same) == 20
        assert same.num_bytes == size(tmp_path) == 20 * FILE_BYTES
        assert all(key_of(i) in same and has(same, i) for i in range(20))
        assert key_of(20) not in same
        assert not has(same, 20)


@pytest.mark.parametrize("restart", [False, True])
def test_the_least_recently_used_goes_first(tmp_path, restart):
    disk = tier(tmp_path, 4)
    for i in range(4):
        put(disk, i)
    assert has(disk, 0)
    assert put(disk, 2)  # it is there: a use, not a second file
    if restart:
        disk = tier(tmp_path, 4)
    put(disk, 4)
    put(disk, 5)
    assert [has(disk, i) for i in range(6)] == [True, False, True, False, True, True]
    assert {bytes(digest) for digest in disk.dropped} == {key_of(1).digest, key_of(3).digest}
    assert disk.num_evicted == 2


def test_the_total_size_is_bounded_at_every_moment(tmp_path, monkeypatch, rng):
    disk, seen = tier(tmp_path, 5), []
    rename = type(tmp_path).replace

    def watched(self, target):
        seen.append(size(tmp_path))
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "replace", watched)
    for _ in range(100):
        assert put(disk, rng.randrange(20))
    assert max(seen) == size(tmp_path) == 5 * FILE_BYTES


def test_a_smaller_capacity_after_a_restart_is_kept_at_once(tmp_path):
    disk = tier(tmp_path)
    for i in range(10):
        put(disk, i)
    disk = tier(tmp_path, 3)
    assert size(tmp_path) == 3 * FILE_BYTES
    assert [i for i in range(10) if has(disk, i)] == [7, 8, 9]


def test_files_of_another_layout_are_misses_but_count(tmp_path):
    old, new = tier(tmp_path, 4), tier(tmp_path, 4, OTHER_LAYOUT)
    for i in range(4):
        put(old, i)
    assert not has(new, 0)
    assert put(new, 0)
    assert put(new, 1)
    assert size(tmp_path) == 4 * FILE_BYTES
    assert [has(old, i) for i in range(4)] == [False, False, True, True]
    assert not new.dropped, "pages of another layout are nobody's here"


def test_a_foreign_file_under_the_name_of_a_page_is_a_miss_and_removed(tmp_path):
    old, new = tier(tmp_path, layout=OTHER_LAYOUT), tier(tmp_path)
    put(old, 0)
    file_of(tmp_path, 0).parent.mkdir(parents=True)
    file_of(tmp_path, 0, OTHER_LAYOUT).rename(file_of(tmp_path, 0))
    assert key_of(0) in new
    assert not has(new, 0)
    assert files(tmp_path) == []


def test_a_damaged_or_truncated_file_is_a_miss_removed_and_can_be_written_again(tmp_path, rng, caplog):
    disk = tier(tmp_path)
    for round_ in range(60):
        put(disk, 0)
        path = file_of(tmp_path, 0)
        raw = bytearray(path.read_bytes())
        position = rng.randrange(len(raw))
        raw[position] ^= rng.randrange(1, 256)
        path.write_bytes(raw[: rng.randrange(len(raw))] if round_ % 3 == 0 else raw)
        assert not has(disk, 0)
        assert not path.exists()
        assert key_of(0) not in disk
    assert disk.num_damaged == len(warnings(caplog)) == 60
    assert put(disk, 0)
    assert has(disk, 0)
    assert disk.num_bytes == FILE_BYTES


def test_a_vanished_file_is_a_miss(tmp_path, caplog):
    disk = tier(tmp_path)
    put(disk, 0)
    file_of(tmp_path, 0).unlink()
    assert key_of(0) in disk  # as far as it knows
    assert not has(disk, 0)
    assert key_of(0) not in disk
    assert (list(disk.dropped), disk.num_bytes, warnings(caplog)) == ([key_of(0).digest], 0, [])


def test_a_directory_emptied_under_way_is_filled_again(tmp_path):
    disk = tier(tmp_path)
    put(disk, 0)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    tmp_path.rmdir()
    assert not has(disk, 0)
    assert put(disk, 0)
    assert has(disk, 0)


def test_reading_errors_are_misses_said_once(tmp_path, monkeypatch, caplog):
    disk = tier(tmp_path)
    put(disk, 0)

    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pagefile.os, "readv", broken)
    assert not has(disk, 0)
    assert not has(disk, 0)
    monkeypatch.undo()
    assert has(disk, 0)
    assert len(warnings(caplog)) == 1


def check_full(disk: DiskTier, caplog) -> None:
    """Page 0 was written before the disk was full; writing goes off with one warning, reading goes on."""
    assert not put(disk, 1)
    assert not put(disk, 2)
    assert has(disk, 0)
    assert not disk.is_writable
    assert len(warnings(caplog)) == 1
    assert "no more pages are written" in warnings(caplog)[0]
    assert len(files(disk.directory)) == 1


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_disk_turns_writing_off(tmp_path, monkeypatch, caplog, reason):
    disk = tier(tmp_path)
    put(disk, 0)
    write = os.write

    def full(descriptor, rest):
        if len(rest) < LAYOUT.num_bytes:
            return write(descriptor, rest)
        write(descriptor, rest[:100])
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(pagefile.os, "write", full)
    check_full(disk, caplog)


def test_a_file_size_limit_turns_writing_off(tmp_path, caplog):
    """The real thing: the kernel refuses the second half of a file."""
    large = PageLayout.of(4, {"latent": 1 << 21}, {})
    disk = DiskTier(tmp_path, 1 << 24, large)
    assert put(disk, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        check_full(disk, caplog)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_that_cannot_be_deleted_turn_writing_off(tmp_path, monkeypatch, caplog):
    disk = tier(tmp_path, 1)
    put(disk, 0)

    def refused(self, missing_ok=False):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "unlink", refused)
    check_full(disk, caplog)


def test_unfinished_files_count_and_are_swept_when_their_writer_must_be_dead(tmp_path):
    disk = tier(tmp_path, 3)
    put(disk, 0)
    part = file_of(tmp_path, 0).with_name(f".{key_of(7).digest.hex()}.page.abc123.part")
    part.write_bytes(bytes(FILE_BYTES))
    restarted = tier(tmp_path, 3)
    assert restarted.num_bytes == 2 * FILE_BYTES
    put(restarted, 1)
    put(restarted, 2)
    assert part.exists()
    assert size(tmp_path) == 3 * FILE_BYTES
    long_ago = time.time_ns() - folder.PART_LIFETIME_NS - 10**9
    os.utime(part, ns=(long_ago, long_ago))
    assert tier(tmp_path, 3).num_bytes == 2 * FILE_BYTES
    assert not part.exists()


def test_files_of_others_are_left_alone(tmp_path):
    inside = tmp_path / LAYOUT.fingerprint.hex() / "00"
    names = [
        tmp_path / "notes.txt",
        tmp_path / "ab" / "x.page",
        inside / "readme",
        inside / "..page.part",
        inside / "a.page",
    ]
    for path in names:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    disk = tier(tmp_path, 1)
    for i in range(5):
        assert put(disk, i)
    assert all(path.read_text() == "mine" for path in names)
    assert disk.num_bytes == FILE_BYTES


def test_a_colliding_digest_is_a_miss(tmp_path):
    disk = tier(tmp_path)
    put(disk, 0)
    assert disk.read(PageKey(key_of(0).digest, key_of(1).tokens), empty()) is None


def test_useless_settings_are_refused_with_the_numbers(tmp_path):
    with pytest.raises(ConfigError, match=f"got 10 bytes, but the file of one page takes {FILE_BYTES}"):
        DiskTier(tmp_path, 10, LAYOUT)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use .*file.*name another directory"):
        tier(tmp_path / "file")


def test_many_files_and_uses_keep_the_books_small(tmp_path, rng):
    disk = tier(tmp_path, 8)
    for _ in range(3000):
        number = rng.randrange(8)
        if not has(disk, number):
            put(disk, number)
    assert len(disk) == 8
    assert len(disk._folder._ages) < 2 * 8 + 1024 + 2
    expected = content_of(3)
    got = empty()
    assert disk.read(key_of(3), got) is not None
    assert (got == expected).all()


def test_clearing_deletes_the_pages_of_this_layout_alone(tmp_path):
    disk, other = tier(tmp_path), tier(tmp_path, layout=OTHER_LAYOUT)
    second = tier(tmp_path)
    for number in range(6):
        put(disk if number % 2 else second, number)
    put(other, 0)
    disk.clear()
    assert not any(has(disk, number) or key_of(number) in disk for number in range(6))
    assert {bytes(digest) for digest in disk.dropped} == {key_of(number).digest for number in range(6)}
    assert has(other, 0)
    assert put(disk, 1)
    assert has(disk, 1)
