"""A page file is there whole or not at all, and no damage to it passes."""

import errno
import os

import pytest
import torch

from glm5.engine.tiers import pagefile
from glm5.engine.tiers.key import PageKey, page_key
from glm5.engine.tiers.pagefile import BadPageFile, checksum_of, file_bytes, read_page_file, write_page_file
from tests.unit.engine.tiers.pages import LAYOUT, OTHER_LAYOUT, content_of, empty, key_of

HEADER_BYTES = file_bytes(LAYOUT) - LAYOUT.num_bytes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "page"


def write(path, number: int = 0, layout=LAYOUT, key: PageKey | None = None) -> None:
    content = content_of(number)
    write_page_file(path, layout, key or key_of(number), content, checksum_of(content), writer="ab", stamp_ns=10**18)


def read(path, number: int = 0, layout=LAYOUT, key: PageKey | None = None):
    content = empty()
    assert read_page_file(path, layout, key or key_of(number), content) == checksum_of(content)
    return content


def test_round_trip(path):
    write(path)
    assert torch.equal(read(path), content_of(0))
    assert path.stat().st_size == file_bytes(LAYOUT)
    assert path.stat().st_mtime_ns == 10**18
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["page"]


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_a_changed_byte_of_the_header_is_noticed(path, position, rng):
    write(path)
    damage(path, position, rng)
    with pytest.raises(BadPageFile):
        read(path)


def test_a_changed_byte_of_the_content_is_noticed(path, rng):
    for _ in range(200):
        write(path)
        damage(path, rng.randrange(HEADER_BYTES, file_bytes(LAYOUT)), rng)
        with pytest.raises(BadPageFile, match="content is damaged"):
            read(path)


def test_pieces_that_were_never_written_are_noticed(path, rng):
    """What a power cut may leave: the right length, some stretches zero."""
    for _ in range(50):
        write(path)
        start = rng.randrange(file_bytes(LAYOUT) - 16)
        raw = bytearray(path.read_bytes())
        raw[start : start + 64] = bytes(len(raw[start : start + 64]))
        path.write_bytes(raw)
        with pytest.raises(BadPageFile):
            read(path)


def damage(path, position: int, rng) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= rng.randrange(1, 256)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "size", [0, 1, 8, HEADER_BYTES - 1, HEADER_BYTES, file_bytes(LAYOUT) - 1, file_bytes(LAYOUT) + 1]
)
def test_a_file_of_another_length_is_noticed(path, size):
    write(path)
    os.truncate(path, size)
    with pytest.raises(BadPageFile, match=f"{size} bytes instead of {file_bytes(LAYOUT)}"):
        read(path)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(path, monkeypatch):
    write(path)
    readv = os.readv

    def shrinking(descriptor, buffers):
        os.truncate(path, HEADER_BYTES + 10)
        return readv(descriptor, buffers)

    monkeypatch.setattr(pagefile.os, "readv", shrinking)
    with pytest.raises(BadPageFile, match="truncated"):
        read(path)


def test_reads_and_writes_may_come_in_pieces(path, monkeypatch):
    write_some, readv = os.write, os.readv
    monkeypatch.setattr(pagefile.os, "write", lambda descriptor, rest: write_some(descriptor, rest[:7]))
    monkeypatch.setattr(pagefile.os, "readv", lambda descriptor, buffers: readv(descriptor, [buffers[0][:5]]))
    write(path)
    assert torch.equal(read(path), content_of(0))


def test_another_layouts_or_pages_file_is_noticed(path):
    collision = PageKey(key_of(0).digest, key_of(1).tokens)
    other_salt = page_key(None, [0, 1, 2, 3], b"tenant")
    for written in ({"layout": OTHER_LAYOUT}, {"key": key_of(1)}, {"key": collision}, {"key": other_salt}):
        write(path, **written)
        with pytest.raises(BadPageFile, match="another page's"):
            read(path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_neither_blocks_nor_misleads(path, make):
    make(path)
    with pytest.raises((BadPageFile, OSError)):
        read(path)


@pytest.mark.parametrize("failing", ["open", "write", "utime", "replace"])
def test_a_failed_write_leaves_what_was_there(path, monkeypatch, failing):
    write(path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "replace":
        monkeypatch.setattr(type(path), "replace", full)
    else:
        monkeypatch.setattr(pagefile.os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        write(path, 1)
    monkeypatch.undo()
    assert torch.equal(read(path), content_of(0))
    assert [file.name for file in path.parent.iterdir()] == ["page"]
