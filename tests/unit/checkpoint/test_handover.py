"""Tensors for another process: every one arrives under its name on disk, and no file is left when one cannot."""

import errno
import shutil
from collections import namedtuple

import pytest
import torch

from glm5.checkpoint import handover
from glm5.checkpoint.handover import hand_over
from glm5.checkpoint.save import save
from glm5.checkpoint.update import replace, stage
from glm5.common.errors import CheckpointError
from tests.support.checkpoints import read_tensors
from tests.support.models import random_model

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """The folder in whose place memory is."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(handover, "_SHARED_MEMORY", folder)
    return folder


def test_every_tensor_of_a_model_arrives(memory, tmp_path):
    old, new = random_model(1), random_model(2)
    folder = hand_over(new.state_dict())
    assert folder.parent == memory
    on_disk, saved = read_tensors(folder), read_tensors(save(new, tmp_path / "saved"))
    assert on_disk.keys() == saved.keys()
    assert all(torch.equal(on_disk[name], saved[name]) for name in saved)
    replace(old, stage(old, folder))
    assert all(torch.equal(a, b) for a, b in zip(old.state_dict().values(), new.state_dict().values(), strict=True))


def test_where_there_is_room(memory, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    free = {memory: 1000, elsewhere: 1_000_000}
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free[path]))
    assert hand_over({"x": torch.ones(10)}).parent == memory
    assert hand_over({"x": torch.ones(1000)}).parent == elsewhere
    with pytest.raises(CheckpointError, match="the weights take 4,000,000 bytes, and free are 1,000 in "):
        hand_over({"x": torch.ones(1_000_000)})


def test_nothing_is_left_where_writing_fails(memory, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(handover, "write_shards", full)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        hand_over({"x": torch.ones(10)})
    assert not list(memory.iterdir())
