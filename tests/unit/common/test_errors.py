"""The tree of errors, and optional packages that are missing or broken."""

import errno
import sys

import pytest

from glm5.common import open_files
from glm5.common.errors import (
    CheckpointError,
    ConfigError,
    GlmError,
    MissingExtra,
    RequestError,
    UsageError,
    advice_on_files,
    reason_of,
)
from glm5.common.extras import require


def test_tree():
    for kind, base in [(ConfigError, ValueError), (RequestError, ValueError), (MissingExtra, ImportError)]:
        assert issubclass(kind, GlmError)
        assert issubclass(kind, base)
    assert issubclass(CheckpointError, GlmError)
    assert issubclass(UsageError, GlmError)
    assert RequestError("no", param="stop").param == "stop"
    assert RequestError("no").param is None


def test_require_gives_the_module():
    assert require("json", "serve") is sys.modules["json"]


@pytest.mark.parametrize("module", ["surely_not_there", "surely_not_there.sub"])
def test_missing_package_names_the_command(module):
    with pytest.raises(MissingExtra) as caught:
        require(module, "serve")
    assert str(caught.value) == "this needs the package 'surely_not_there': run  pip install 'glm5[serve]'"


def test_broken_package_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import surely_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        require("broken_package", "serve")
    assert not isinstance(caught.value, MissingExtra)
    assert caught.value.name == "surely_not_there"


def test_too_many_open_files_are_told_of_with_limit_and_remedy(monkeypatch):
    monkeypatch.setattr(open_files, "limit", lambda: 20)
    error = OSError(errno.EMFILE, "Too many open files")
    advice = "; raise the limit of open files (ulimit -n) to 256 or more; it is 20"
    assert advice_on_files(error) == advice
    assert reason_of(error).endswith(f"Too many open files{advice}")
    assert advice_on_files(OSError(errno.ENOENT, "x")) == advice_on_files(ValueError()) == ""
