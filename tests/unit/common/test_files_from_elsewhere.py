"""Files that checkpoints and users bring: too large, too deep or no files at all, they are refused by name at once."""

import json
import os
from contextlib import suppress

import pytest

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.checkpoint.adapters import read_adapter
from glm5.checkpoint.dense_mla import has_no_indexers
from glm5.checkpoint.index import read_weight_map
from glm5.checkpoint.shard import read_header
from glm5.common.bounded import SETTINGS, TABLES, TEXTS
from glm5.common.errors import CheckpointError, ConfigError, DataError, GlmError
from glm5.config.model import ModelConfig
from glm5.config.train import read_recipe as read_training
from glm5.engine.defaults import read_defaults
from glm5.quantize.calibration_text import _from_file
from glm5.quantize.recipe import read_recipe as read_quantization
from glm5.train.data.tokens import TokenFile
from tests.support.tokenizers import tiny_tokenizer

# How a file of a folder is read, its name, the bytes that are read of it at most, and the error.
READS = {
    "config": (ModelConfig.from_file, "config.json", SETTINGS, ConfigError),
    "defaults": (lambda folder: read_defaults(folder, None), "generation_config.json", SETTINGS, ConfigError),
    "tokenizer": (Tokenizer.from_dir, "tokenizer.json", TABLES, CheckpointError),
    "tokenizer's settings": (Tokenizer.from_dir, "tokenizer_config.json", SETTINGS, CheckpointError),
    "template": (ChatTemplate.for_checkpoint, "chat_template.jinja", 2**20, CheckpointError),
    "index": (read_weight_map, "model.safetensors.index.json", TABLES, CheckpointError),
    "adapter": (read_adapter, "adapter_config.json", SETTINGS, CheckpointError),
    "training": (lambda folder: read_training(folder / "recipe.toml"), "recipe.toml", SETTINGS, ConfigError),
    "quantization": (lambda folder: read_quantization(folder / "recipe.toml"), "recipe.toml", SETTINGS, ConfigError),
    "calibration": (
        lambda folder: list(_from_file(folder / "a.json", tiny_tokenizer(), 5)),
        "a.json",
        TEXTS,
        ConfigError,
    ),
    "token file": (TokenFile, "index.json", SETTINGS, DataError),
}
JSON = ["config", "defaults", "tokenizer", "tokenizer's settings", "index", "adapter", "token file", "calibration"]
# Files that are looked for are missing where there is no regular one; these are given by name, or must be there.
GIVEN = ["adapter", "training", "quantization", "token file", "calibration"]


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer().save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", READS)
def test_too_large(folder, kind):
    read, name, limit, error = READS[kind]
    with (folder / name).open("wb") as file:
        file.truncate(limit + 1)  # a hole: on no disk
    with pytest.raises(error, match=rf"{name} is larger than {limit // 2**20} MiB, the most that is read"):
        read(folder)


@pytest.mark.parametrize("kind", JSON)
def test_nested_without_end(folder, kind):
    read, name, _, error = READS[kind]
    (folder / name).write_text('{"a":' + "[" * 200_000)
    with pytest.raises(error, match=name):
        read(folder)


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
@pytest.mark.parametrize("kind", GIVEN)
def test_no_file_at_all(folder, kind, what):
    read, name, _, error = READS[kind]
    if what == "pipe":
        os.mkfifo(folder / name)
    elif what == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).mkdir()
    with pytest.raises(error, match=f"{name} is not a regular file"):
        read(folder)


@pytest.mark.parametrize("kind", [kind for kind in READS if kind not in GIVEN])
def test_what_is_looked_for_is_no_pipe(folder, kind):
    read, name = READS[kind][:2]
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with suppress(GlmError):  # a file that must be there is missing; nothing else may come, least of all nothing at all
        read(folder)


def test_pipes_in_place_of_weights(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a regular file"):
        read_header(tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is not a regular file"):
        read_adapter(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    assert not has_no_indexers(tmp_path)
