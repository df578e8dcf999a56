"""Files and folders appear whole or not at all, and nothing is left behind."""

import os
import stat

import pytest

from glm5.common.atomic import atomic_dir, atomic_write


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
