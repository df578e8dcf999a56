"""Where Triton keeps what it compiles."""

import pytest

from glm5.common.errors import ConfigError
from glm5.kernels.triton_support import check_kernel_cache

knobs = pytest.importorskip("triton").knobs


def test_a_folder_for_kernels_is_made_or_refused_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "new"))
    check_kernel_cache()
    assert list((tmp_path / "new").iterdir()) == []
    for place, why in ((tmp_path / "file", "File exists"), ("/proc/cache", "No such file or directory")):
        monkeypatch.setattr(knobs.cache, "dir", str(place))
        with pytest.raises(ConfigError) as caught:
            check_kernel_cache()
        assert str(caught.value).startswith(f"compiled kernels cannot be kept in {place} ({why}); set TRITON_CACHE_DIR")


def test_kernels_that_are_there_need_no_room_for_others(tmp_path, monkeypatch):
    def is_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("glm5.kernels.triton_support.try_to_write", is_full)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with pytest.raises(ConfigError, match="No space left"):
        check_kernel_cache()
    (tmp_path / "kernel").mkdir()
    check_kernel_cache()
