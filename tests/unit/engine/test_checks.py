"""GPUs that a machine lacks are counted in the refusal; what it has is not. Folders for pages are tried."""

import stat

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.config.keywords import engine_config
from glm5.engine import checks
from glm5.engine.checks import check_adapter, check_disk, check_gpus


@pytest.fixture
def gpus(monkeypatch):
    """Lets this machine have so many."""

    def no_driver():
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease install one")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("count", "device", "ranks", "message"),
    [
        (0, "cuda", 1, "device: got cuda; torch finds no GPU here (Found no NVIDIA driver on your system); allowed"),
        (0, "cuda", 2, "device: got cuda; tensor_parallel_size 2 needs 2 GPUs, and torch finds no GPU here (Found no"),
        (0, "cuda:1", 1, "device: got cuda:1; torch finds no GPU here"),
        (2, "cuda:2", 1, "device: got cuda:2; torch finds 2 of them here; allowed here: auto, cpu, cuda, or cuda:0 to"),
        (2, "cuda:1", 2, "device: got cuda:1, which is one GPU, and tensor_parallel_size 2 needs 2; allowed: cuda"),
        (2, "cuda", 4, "tensor_parallel_size: got 4, which needs 4 GPUs, and torch finds 2 here; allowed here: up to"),
        (1, "auto", 2, "tensor_parallel_size: got 2, which needs 2 GPUs, and torch finds 1 here; allowed here: up to"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_counted(gpus, count, device, ranks, message):
    gpus(count)
    with pytest.raises(ConfigError) as caught:
        check_gpus(device, ranks)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("count", "device", "ranks"), [(0, "auto", 8), (0, "cpu", 2), (1, "auto", 1), (2, "cuda:1", 1), (2, "cuda", 2)]
)
def test_what_is_there_is_allowed(gpus, count, device, ranks):
    gpus(count)
    check_gpus(device, ranks)


def test_a_folder_for_pages_is_made_and_tried(tmp_path):
    check_disk(None)
    check_disk(str(tmp_path / "a" / "b"))
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "why"),
    [("/dev/null", "it is a file"), ("/proc/x", "No such file or directory"), ("a\0b", "embedded null byte")],
)
def test_a_folder_that_takes_no_pages_is_refused(folder, why):
    with pytest.raises(ConfigError) as caught:
        check_disk(folder)
    assert str(caught.value).startswith(f"kv_disk_dir: got {folder!r}, where nothing can be written ({why}); allowed: ")


def test_a_full_disk_is_refused(tmp_path, monkeypatch):
    def is_full(_, num_bytes):
        assert num_bytes > 4096, "a full disk may have room for less"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checks, "try_to_write", is_full)
    with pytest.raises(ConfigError, match="No space left on device"):
        check_disk(str(tmp_path))


def test_an_adapter_is_looked_for_before_anything_is_loaded(tmp_path):
    check_adapter(None)
    with pytest.raises(ConfigError, match=r"adapter: got '.*'; allowed: a folder with adapter_config\.json"):
        check_adapter(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    check_adapter(str(tmp_path))
    with pytest.raises(ConfigError, match="adapter: got 'a'; allowed: none with tensor_parallel_size 2; merge it"):
        engine_config({"adapter": "a", "tensor_parallel_size": 2})
