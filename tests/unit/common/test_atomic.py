"""Files and folders appear whole or not at all, and nothing is left behind."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from glm5.common.atomic import atomic_dir, atomic_write, atomic_write_json, clear_leftovers


def test_file_appears_with_its_content_only_at_the_end(tmp_path):
    path = tmp_path / "a.json"
    with atomic_write(path) as file:
        file.write("ä")
        file.flush()
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "ä"
    assert os.listdir(tmp_path) == ["a.json"]


def test_file_has_the_rights_of_a_plain_one(tmp_path):
    (tmp_path / "plain").write_text("")
    with atomic_write(tmp_path / "atomic", "wb") as file:
        file.write(b"\0")
    assert stat.S_IMODE((tmp_path / "atomic").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_file_leaves_the_old_one(tmp_path, error):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write("half")
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    for name, to in {"a": "folder/b", "folder/b": "c"}.items():  # the last does not exist
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(to)
    for text in ("first", "second"):
        with atomic_write(tmp_path / "a") as file:
            file.write(text)
        assert (tmp_path / "a").is_symlink()
        assert (tmp_path / "folder/b").is_symlink()
        assert (tmp_path / "folder/c").read_text() == text
    assert sorted(os.listdir(tmp_path / "folder")) == ["b", "c"]
    (tmp_path / "x").symlink_to("x")
    with pytest.raises(OSError, match="symbolic links"), atomic_write(tmp_path / "x"):
        pass


def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("pipe", "link"):
        atomic_write_json(tmp_path / name, {"a": 1})
        assert os.read(reader, 99) == b'{\n "a": 1\n}\n'
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


@pytest.mark.parametrize("kind", ["pipe", "socket", "file"])
def test_an_open_descriptor_is_written_to(tmp_path, kind):
    (tmp_path / "file").write_text("before\n")
    first, second = socket.socketpair()
    file = (tmp_path / "file").open("r+b", buffering=0)
    file.seek(0, os.SEEK_END)
    ours, theirs = {"pipe": os.pipe(), "socket": (first.fileno(), second.fileno()), "file": (0, file.fileno())}[kind]
    (tmp_path / "stdout").symlink_to(f"/dev/fd/{theirs}")
    for name in (f"/dev/fd/{theirs}", tmp_path / "stdout"):
        with atomic_write(name) as handle:
            handle.write("ä")
    content = (tmp_path / "file").read_bytes() if kind == "file" else os.read(ours, 99)
    assert content == ("before\n" * (kind == "file") + "ää").encode()
    assert sorted(os.listdir(tmp_path)) == ["file", "stdout"]
    if kind == "pipe":
        os.close(ours)
        os.close(theirs)
    for each in (first, second, file):
        each.close()


def test_a_full_disk_is_told_of_with_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: .*/a\.json'"), atomic_write(tmp_path / "a.json"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got mode 'r', allowed: 'w' or 'wb'"), atomic_write(tmp_path / "a", "r"):
        pass


def test_folder_appears_at_the_end_and_replaces_the_old_one(tmp_path):
    target = tmp_path / "sub" / "model"
    for content in ("first", "second"):
        with atomic_dir(target) as building:
            (building / content).write_text(content)
            assert not (target / content).exists()
        assert os.listdir(target) == [content]
    assert os.listdir(tmp_path / "sub") == ["model"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_folder_leaves_the_old_one(tmp_path, error):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("")
    with pytest.raises(error), atomic_dir(target) as building:
        (building / "half").write_text("")
        raise error
    assert os.listdir(tmp_path) == ["model"]
    assert os.listdir(target) == ["old"]


def test_an_interrupt_that_comes_with_the_folder_leaves_none(tmp_path, monkeypatch):
    mkdir = type(tmp_path).mkdir

    def interrupted(path, *given, **more):
        mkdir(path, *given, **more)
        if path.suffix == ".part":
            raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_dir(tmp_path / "model"):
        pass
    assert os.listdir(tmp_path) == []


KILLED = """
import os, pathlib, signal, sys
from glm5.common import atomic
target, moment = pathlib.Path(sys.argv[1]), sys.argv[2]
kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
with atomic.atomic_dir(target) as building:
    (building / "new").write_text("")
    if moment == "between the renames":
        rename = type(target).replace
        type(target).replace = lambda path, to: rename(path, to) if path == target else kill()
    if moment == "while the old one is deleted":
        atomic.shutil.rmtree = kill
    if moment == "while it is written":
        kill()
"""


@pytest.mark.parametrize(
    ("moment", "there"),
    [("while it is written", "old"), ("between the renames", "old"), ("while the old one is deleted", "new")],
)
def test_what_a_killed_process_has_left_goes_with_the_next(tmp_path, moment, there):
    target = tmp_path / "[a] model"
    target.mkdir()
    (target / "old").write_text("")
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), moment], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    assert clear_leftovers(target) == []
    assert os.listdir(tmp_path) == [target.name]
    assert os.listdir(target) == [there]


def test_what_is_being_written_stays(tmp_path):
    target = tmp_path / "model"
    with atomic_dir(target) as first:
        assert clear_leftovers(target) == [first]
        with atomic_dir(target) as second:
            (second / "file").write_text("")
        (first / "later").write_text("")
    assert os.listdir(tmp_path) == ["model"]
    assert os.listdir(target) == ["later"]


def test_other_names_are_left_alone(tmp_path):
    folders = [".model.part", ".model.0123abcd.part.txt", ".models.0123abcd.part", ".model.x.0123abcd.old"]
    for name in folders:
        (tmp_path / name).mkdir()
    (tmp_path / ".model.0123abcd.old").write_text("a file")
    with atomic_dir(tmp_path / "model"):
        pass
    assert sorted(os.listdir(tmp_path)) == sorted([*folders, ".model.0123abcd.old", "model"])
