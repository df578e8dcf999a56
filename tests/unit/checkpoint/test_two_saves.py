"""Shards of two saves are not one model: their tensors fit, and nobody would notice."""

import json
import shutil
import struct

import pytest

from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.checkpoint.shard import SAVE_KEY
from glm5.checkpoint.update import stage
from glm5.common.errors import CheckpointError
from tests.support.models import random_model

SHARD_BYTES = 400_000


def header_of(file):
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def without_id(folder):
    """As others write them."""
    for file in folder.glob("*.safetensors"):
        header, rest = header_of(file)
        header["__metadata__"].pop(SAVE_KEY)
        raw = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(raw)) + raw + rest)
    return folder


@pytest.fixture
def steps(tmp_path):
    """Two steps of one model, each in several shards."""
    folders = [save(random_model(i), tmp_path / str(i), max_shard_bytes=SHARD_BYTES) for i in (1, 2)]
    assert len(list(folders[0].glob("*.safetensors"))) > 2
    return folders


def test_a_save_loads_and_its_shards_say_whose_they_are(steps):
    for folder in steps:
        assert len({header_of(file)[0]["__metadata__"][SAVE_KEY] for file in folder.glob("*.safetensors")}) == 1
        load(folder)


def test_shards_of_two_steps_are_refused(steps):
    model = load(steps[0])
    stage(model, steps[1])
    shard = sorted(steps[1].glob("*.safetensors"))[1].name
    shutil.copyfile(steps[0] / shard, steps[1] / shard)
    for read in (lambda: stage(model, steps[1]), lambda: load(steps[1])):
        with pytest.raises(CheckpointError, match=r"safetensors are of different saves, perhaps of two steps"):
            read()


def test_a_shard_of_somebody_else_is_refused_too(steps, tmp_path):
    other = without_id(shutil.copytree(steps[0], tmp_path / "other"))
    shard = min(other.glob("*.safetensors")).name
    shutil.copyfile(steps[0] / shard, other / shard)
    with pytest.raises(CheckpointError, match="are of different saves"):
        stage(load(steps[0]), other)


def test_shards_that_say_nothing_load(steps):
    model = load(without_id(steps[0]))
    stage(model, steps[0])


def test_one_file_is_the_same_to_the_byte_each_time(tmp_path):
    first, second = (save(random_model(1), tmp_path / name) / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
