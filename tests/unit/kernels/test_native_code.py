"""Native code where nothing can be kept: compiled for this process alone, and said."""

import pytest

from glm5.kernels import native_code
from glm5.kernels.native_code import find_compiler, library


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "error", [RuntimeError("nobody knows where home is"), PermissionError(13, "Permission denied")]
)
def test_a_home_that_is_not_there_or_is_somebody_else_s_is_no_obstacle(tmp_path, monkeypatch, caplog, error):
    def home():
        raise error

    source = tmp_path / "one" / "one.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(native_code.Path, "home", home)
    found = library(source, "slow")
    assert found is not None, caplog.text
    assert found.one() == 1
    assert "is compiled at every start, as nothing can be kept" in caplog.text
