"""Inspecting: from headers alone, right at full size, on this machine and on the hub."""

import json
import os
import struct
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

from glm5.checkpoint.inspect import inspect
from glm5.checkpoint.names import SCALE_SUFFIX
from glm5.checkpoint.save import config_dict
from glm5.checkpoint.shard import parse_header
from glm5.checkpoint.writer import TensorLayout, _write_header, shard_name, split_shards
from glm5.config.presets import preset
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import num_blocks
from tests.support.checkpoints import edit_json, edit_tensors, read_tensors, shard_files


def test_tiny(originals):
    report = inspect(originals["bf16"])
    assert report.loads
    assert report.num_files == len(shard_files(originals["bf16"]))
    assert report.num_tensors == len(tensor_specs(report.cfg))
    assert report.num_bytes == sum(t.nbytes for t in read_tensors(originals["bf16"]).values())
    assert report.bytes_by_dtype["BF16"] == 2 * report.parameters.with_mtp
    assert report.bytes_by_dtype["F32"] == 4 * report.parameters.biases
    by_part = {part: 2 * number for part, number in report.parameters.by_part.items()}
    biases_of_trunk = 4 * 8 * 3
    assert report.bytes_by_part == by_part | {
        "router": by_part["router"] + biases_of_trunk,
        "mtp": by_part["mtp"] + 4 * 8,
    }


def test_what_does_not_fit_is_listed_by_name(bf16):
    def edit(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.4.embed_tokens.weight"] = tensors["lm_head.weight"].clone()
        tensors["other"] = tensors["lm_head.weight"].clone()

    edit_tensors(bf16, edit)
    edit_json(bf16 / "config.json", new_key=1)
    report = inspect(bf16).to_dict()
    assert json.loads(json.dumps(report)) == report
    assert not report["loads"]
    assert report["missing"] == ["model.norm.weight [64]"]
    assert report["unexpected"] == ["other [320, 64]"]
    assert report["ignored"][0].startswith("model.layers.4.embed_tokens.weight: the MTP layer reads")
    assert report["unknown_config_keys"] == ["new_key"]
    assert report["bytes_by_part"]["unexpected"] == report["bytes_by_part"]["ignored"] == 320 * 64 * 2


def test_full_size_fp8_equals_the_published_byte_counts(tmp_path):
    """GLM-5.2-FP8 as sparse files: 0.7 TB by their headers, a few megabytes on disk, so no weight can be read."""
    cfg = preset("glm-5.2")
    layout = []
    for spec in tensor_specs(cfg):
        code = "F8_E4M3" if spec.fp8 else {"bf16": "BF16", "f32": "F32"}[spec.dtype]
        layout.append(TensorLayout(spec.name, code, spec.shape))
        if spec.fp8:
            grid = tuple(num_blocks(size) for size in spec.shape)
            layout.append(TensorLayout(spec.name + SCALE_SUFFIX, "F32", grid))
    shards = split_shards(layout, 50_000_000_000)
    weight_map = {}
    for i, shard in enumerate(shards):
        with (tmp_path / shard_name(i, len(shards))).open("wb") as file:
            _write_header(file, shard, None)
        weight_map |= {tensor.name: shard_name(i, len(shards)) for tensor in shard}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    if sum(file.stat().st_blocks * 512 for file in shard_files(tmp_path)) > 10**9:
        pytest.skip("this file system has no sparse files")

    report = inspect(tmp_path)
    assert report.loads
    assert report.num_bytes == 755_617_140_416
    assert report.bytes_by_dtype["F8_E4M3"] == 751_226_191_872
    assert report.bytes_by_dtype["BF16"] == 2 * 2_103_729_152
    assert report.parameters.with_mtp == 753_329_921_024


@pytest.fixture
def hub(originals, monkeypatch):
    """The hub as seen through huggingface_hub, holding the FP8 checkpoint as zai-org/tiny; nothing else is fetched."""
    directory = originals["fp8"]
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]

    def metadata(repo_id):
        assert repo_id == "zai-org/tiny"
        files = {}
        for path in shard_files(directory):
            with path.open("rb") as file:
                raw = file.read(struct.unpack("<Q", file.read(8))[0])
            entries = parse_header(raw, path.name, 0, path)
            tensors = {
                e.name: SimpleNamespace(dtype=e.dtype, shape=list(e.shape), data_offsets=(e.start, e.stop))
                for e in entries
            }
            files[path.name] = SimpleNamespace(tensors=tensors)
        return SimpleNamespace(files_metadata=files, weight_map=weight_map)

    def download(repo_id, filename):
        assert (repo_id, filename) == ("zai-org/tiny", "config.json")
        return os.fspath(directory / filename)

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return directory


def test_a_hub_id_gives_the_same_report(hub):
    remote, local = inspect("zai-org/tiny").to_dict(), inspect(hub).to_dict()
    assert remote.pop("source") == "zai-org/tiny"
    local.pop("source")
    assert remote == local


def test_config_of_an_fp8_checkpoint_lists_modules_once():
    listed = config_dict(preset("glm-5.2"), dtype=torch.bfloat16, fp8=True)["quantization_config"]
    names = listed["modules_to_not_convert"]
    assert len(names) == len(set(names))
    assert len(names) == 541, "as many as the published list of GLM-5.2-FP8"
