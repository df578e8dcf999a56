"""Files from elsewhere are read only where they are files, and only up to a size."""

import os

import pytest

from glm5.common.bounded import MIB, read_bounded, read_bounded_text
from glm5.common.errors import CheckpointError, ConfigError


def test_a_file_of_the_largest_size_is_read_and_one_byte_more_is_not(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345678")
    assert read_bounded(file, 8) == b"12345678"
    with pytest.raises(CheckpointError, match=f"{file} is larger than 7 bytes, the most that is read"):
        read_bounded(file, 7)


def test_the_limit_is_said_in_mib_and_the_error_is_the_callers(tmp_path):
    file = tmp_path / "file"
    with file.open("wb") as handle:
        handle.truncate(2**40)  # a hole: not on disk, and must not come into memory
    with pytest.raises(ConfigError, match="larger than 2 MiB"):
        read_bounded(file, 2 * MIB, ConfigError)


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    path = "/dev/zero" if kind == "device" else tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(CheckpointError, match=f"{path} is not a regular file"):
        read_bounded(path, 100)


def test_a_missing_file_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", 100)


def test_text_has_newlines_however_it_was_written(tmp_path):
    (tmp_path / "file").write_bytes("ä\r\nb\rc\n".encode())
    assert read_bounded_text(tmp_path / "file", 100) == "ä\nb\nc\n"
