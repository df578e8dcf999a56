"""Saving: what lies on disk afterwards, and that a save which fails or is killed leaves what was there."""

import errno
import json
import logging
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from glm5.checkpoint import writer
from glm5.checkpoint.load import load
from glm5.checkpoint.names import SCALE_SUFFIX
from glm5.checkpoint.save import ASSET_FILES, save
from glm5.common.errors import CheckpointError
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import quantize_blocks
from tests.support.checkpoints import ragged, read_tensors, shard_files, tiny
from tests.support.models import random_model


@pytest.fixture(scope="module")
def model():
    return random_model(4, tiny())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16), ("float64", torch.float64)],
    ids=str,
)
def test_one_tensor_per_expert_in_the_dtype_asked_for(model, tmp_path, dtype, expected):
    save(model, tmp_path / "out", dtype=dtype)
    stored = read_tensors(tmp_path / "out")
    specs = {spec.name: spec for spec in tensor_specs(model.cfg)}
    assert stored.keys() == specs.keys()
    for name, tensor in stored.items():
        assert tuple(tensor.shape) == specs[name].shape
        assert tensor.dtype == (torch.float32 if specs[name].dtype == "f32" else expected)
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj[3].to(expected)
    assert torch.equal(stored["model.layers.1.mlp.experts.3.gate_proj.weight"], gate_up[:32])
    assert torch.equal(stored["model.layers.1.mlp.experts.3.up_proj.weight"], gate_up[32:])
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == str(expected).removeprefix("torch.")
    assert "quantization_config" not in config


def test_ours_to_ours(model, tmp_path):
    ids = torch.arange(24).reshape(2, 12)
    save(model, tmp_path / "out", max_shard_bytes=40_000)
    again = load(tmp_path / "out")
    assert torch.equal(again.logits(ids), model.logits(ids))
    assert again.cfg == model.cfg.replace(dtype="float32")


def test_shards_and_index(model, tmp_path):
    save(model, tmp_path / "out", max_shard_bytes=50_000)
    files = [file.name for file in shard_files(tmp_path / "out")]
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 10
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_tensors(tmp_path / "out").values())
    assert sorted(set(index["weight_map"].values())) == files
    save(model, tmp_path / "one")
    assert [file.name for file in shard_files(tmp_path / "one")] == ["model.safetensors"]
    assert not (tmp_path / "one/model.safetensors.index.json").exists()


def test_fp8_quantizes_what_published_checkpoints_quantize(tmp_path):
    model = random_model(5, ragged())
    save(model, tmp_path / "out", dtype="fp8")
    stored = read_tensors(tmp_path / "out")
    for spec in tensor_specs(model.cfg):
        kind = torch.float8_e4m3fn if spec.fp8 else torch.float32 if spec.dtype == "f32" else torch.bfloat16
        assert stored[spec.name].dtype == kind
        assert (spec.name + SCALE_SUFFIX in stored) == spec.fp8
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    want = quantize_blocks(model.model.layers[1].mlp.experts.gate_up_proj[3, 136:])
    assert torch.equal(stored[name].float(), want.data.float())
    assert torch.equal(stored[name + SCALE_SUFFIX], want.scale)
    config = json.loads((tmp_path / "out/config.json").read_text())
    quantization = config["quantization_config"]
    assert config["dtype"] == "bfloat16"
    assert quantization["quant_method"] == "fp8"
    assert quantization["weight_block_size"] == [128, 128]
    listed = quantization["modules_to_not_convert"]
    assert "lm_head" in listed
    assert "model.layers.1.mlp.gate" in listed
    assert "model.layers.0.self_attn.indexer.weights_proj" in listed
    assert not [name for name in listed if f"{name}.weight{SCALE_SUFFIX}" in stored]


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_fp8_in_memory_is_stored_bit_for_bit(fp8, tmp_path, dtype):
    before = read_tensors(fp8)
    save(load(fp8), tmp_path / "again", dtype=dtype)
    after = read_tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    assert json.loads((fp8 / "config.json").read_text()) == json.loads((tmp_path / "again/config.json").read_text())


def test_fp8_in_memory_is_dequantized_on_request(fp8, tmp_path):
    save(load(fp8), tmp_path / "dense", dtype="float32")
    stored, dense = read_tensors(tmp_path / "dense"), load(tmp_path / "dense")
    assert not [name for name in stored if name.endswith(SCALE_SUFFIX)]
    assert dense.cfg.quantization_config is None
    direct = load(fp8, dtype="float32").state_dict()
    assert all(torch.equal(tensor, direct[name]) for name, tensor in dense.state_dict().items())


def test_assets_are_copied_and_a_generation_config_made(model, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in [*ASSET_FILES, "unrelated.txt"]:
        (source / name).write_text(f"content of {name}")
    save(model, tmp_path / "with", assets=source)
    assert all((tmp_path / "with" / name).read_text() == f"content of {name}" for name in ASSET_FILES)
    assert not (tmp_path / "with/unrelated.txt").exists()
    save(model, tmp_path / "without")
    made = json.loads((tmp_path / "without/generation_config.json").read_text())
    assert made["eos_token_id"] == list(model.cfg.eos_token_id)
    with pytest.raises(CheckpointError, match="absent: no such directory to copy tokenizer files from"):
        save(model, tmp_path / "other", assets=tmp_path / "absent")
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_is_replaced_whole(model, tmp_path):
    save(model, tmp_path / "out", max_shard_bytes=50_000)
    save(model, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_replacing_keeps_the_tokenizer_that_was_there(model, tmp_path):
    save(model, tmp_path / "out")
    (tmp_path / "out/tokenizer.json").write_text("{}")
    (tmp_path / "out/generation_config.json").write_text('{"top_k": 7}')
    save(model, tmp_path / "out", dtype="bfloat16")
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out/generation_config.json").read_text() == '{"top_k": 7}'
    assert load(tmp_path / "out").dtype == torch.bfloat16


def test_an_empty_directory_is_filled(model, tmp_path):
    (tmp_path / "out").mkdir()
    assert save(model, tmp_path / "out") == tmp_path / "out"
    assert load(tmp_path / "out").cfg.hidden_size == 64


def test_other_directories_and_files_are_not_overwritten(model, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    message = (
        r"holds 1 other file \(thesis\.tex\) that no checkpoint has and that would be lost; give another directory"
    )
    with pytest.raises(CheckpointError, match=message):
        save(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"thesis\.tex is a file; give a directory"):
        save(model, tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_full_disk_is_noticed_before_writing(model, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(CheckpointError, match=r"out: needs [\d,]+ bytes, and 1,000 are free there"):
        save(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def break_third_tensor(monkeypatch, error):
    real, calls = writer._write_tensor, []

    def broken(*args):
        calls.append(1)
        if len(calls) == 3:
            raise error
        real(*args)

    monkeypatch.setattr(writer, "_write_tensor", broken)


@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "saving failed: No space left on device"),
        (RuntimeError("CUDA error"), RuntimeError, "CUDA error"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
    ids=["disk full", "exception", "ctrl-c"],
)
def test_a_failed_save_changes_nothing(model, tmp_path, monkeypatch, existing, error, raised, message):
    if existing:
        save(random_model(6, tiny()), tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    break_third_tensor(monkeypatch, error)
    with pytest.raises(raised, match=message):
        save(model, tmp_path / "out")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"] * existing


KILLED_SAVE = """
import sys
from glm5.checkpoint import writer
from glm5.checkpoint.save import save
from tests.support.checkpoints import tiny
from tests.support.models import random_model

real, calls = writer._write_tensor, []

def stopping(*args):
    calls.append(1)
    if len(calls) == 20:
        print("halfway", flush=True)
        sys.stdin.read()
    real(*args)

writer._write_tensor = stopping
save(random_model(7, tiny()), sys.argv[1], max_shard_bytes=40_000)
"""


@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
def test_a_killed_save_leaves_nothing_under_the_name_and_the_next_one_works(model, tmp_path, caplog, existing):
    out = tmp_path / "out"
    if existing:
        save(model, out)
    root = str(Path(__file__).parents[3])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", KILLED_SAVE, str(out)], cwd=root, **pipes) as child:
        assert child.stdout.readline() == "halfway\n"
        child.kill()
    assert out.exists() == existing
    if existing:
        assert torch.equal(load(out).lm_head.weight, model.lm_head.weight)
    (leftover,) = tmp_path.glob(".out.*.part")
    assert len(shard_files(leftover)) > 1
    save(model, out)
    assert torch.equal(load(out).lm_head.weight, model.lm_head.weight)
    assert not leftover.exists()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
