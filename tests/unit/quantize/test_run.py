"""Whole runs: runs that are cut off go on to the same bytes, and errors name what is wrong and leave no OUT."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from glm5.common.errors import CheckpointError, ConfigError
from glm5.config.quantize import QuantizeConfig
from glm5.quantize import run as running
from glm5.quantize.run import quantize
from glm5.quantize.store import Store, held
from tests.support.checkpoints import edit_json, edit_tensors, read_tensors, snap

BRIEF = {"num_samples": 3, "sample_len": 24, "device": "cpu", "min_tokens": 2, "held_out_tokens": 0}


def settings(model: Path, out: Path, **more: object) -> QuantizeConfig:
    return QuantizeConfig.model_validate({"model": str(model), "out": str(out), **BRIEF, **more})


def content(directory: Path) -> dict[str, bytes]:
    """Every file but the report, which says how long things took."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith("quantization.")}


@pytest.fixture(scope="module")
def straight(small_bf16, tmp_path_factory) -> Path:
    """The recipe of the articles, in one go."""
    return quantize(settings(small_bf16, tmp_path_factory.mktemp("straight") / "new" / "out", scheme="w4a8"))


def test_what_is_written_names_every_module(straight):
    config = json.loads((straight / "config.json").read_text())["quantization_config"]
    assert config["modules"]["model.layers.1.mlp.experts.*.up_proj"] == "w4a8"
    assert config["modules"]["model.layers.1.self_attn.o_proj"] == "w8a8"
    assert not any(".layers.3." in module for module in config["modules"])
    tensors = read_tensors(straight)
    assert tensors["model.layers.1.mlp.experts.5.up_proj.weight"].shape == (128, 64)
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert not list(straight.parent.glob(".*"))


class Cut(Exception):
    """The run ends here."""


@pytest.mark.parametrize("after", [-1, 0, 1, 2])
def test_a_run_that_is_cut_off_goes_on_to_the_same_bytes(small_bf16, straight, tmp_path, monkeypatch, after):
    done = Store.done

    def cut(self, layer_idx, *args):
        done(self, layer_idx, *args)
        if layer_idx == after:
            raise Cut

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(Store, "done", cut)
        quantize(settings(small_bf16, tmp_path / "out", scheme="w4a8"))
    assert not (tmp_path / "out").exists()
    worked: list[int] = []
    work = running.quantize_layer
    monkeypatch.setattr(
        running, "quantize_layer", lambda run, idx, *args: (worked.append(idx), work(run, idx, *args))[1]
    )
    assert content(quantize(settings(small_bf16, tmp_path / "out", scheme="w4a8"))) == content(straight)
    assert worked == list(range(after + 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 2, 3])
def test_kill_9_and_resume(small_bf16, straight, tmp_path, lines):
    """A process that is killed for good, wherever it is after so many layers."""
    flags = [word for key, value in BRIEF.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "glm5", "quantize", str(small_bf16), str(tmp_path / "out"), "--scheme", "w4a8"]
    progress = tmp_path / ".out.quantizing" / "progress.json"
    # Sums are cut among threads: the same number of them gives the same bytes.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if progress.is_file() and len(json.loads(progress.read_text())["layers"]) >= lines:
            break
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert not (tmp_path / "out").exists()
    subprocess.run([*command, *flags], check=True, capture_output=True, timeout=240, env=environment)
    assert content(tmp_path / "out") == content(straight)


def test_one_process_at_a_time_works_in_a_folder(small_bf16, tmp_path):
    with held(tmp_path / ".out.quantizing"), pytest.raises(CheckpointError, match="another process is quantizing"):
        quantize(settings(small_bf16, tmp_path / "out", scheme="w8a8"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"fingerprint": 1, "layers": {}}', '{"fingerprint": {}, "layers": {"x": {}}}']
)
def test_progress_that_is_damaged_is_named(tmp_path, text):
    root = tmp_path / ".out.quantizing"
    (root / "model").mkdir(parents=True)
    (root / "progress.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"progress\.json: damaged; --restart begins anew"):
        Store(tmp_path / "out", {})
    (root / "model" / ".config.json.0123abcd.part").touch()
    with held(root):
        Store(tmp_path / "out", {}, restart=True)
        assert {path.name for path in root.rglob("*")} == {"model", "run.lock"}


def test_other_settings_do_not_go_on_with_a_run(small_bf16, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(Store, "write_layer", full_after(1))
        quantize(settings(small_bf16, tmp_path / "out", scheme="w8a8"))
    with pytest.raises(CheckpointError, match=r"other settings .*recipe.* --restart"):
        quantize(settings(small_bf16, tmp_path / "out", scheme="w4a8"))
    assert quantize(settings(small_bf16, tmp_path / "out", scheme="w4a8", restart=True)).is_dir()


def test_a_run_does_not_go_on_over_other_weights(own_bf16, tmp_path, monkeypatch):
    """Of the same names, shapes and sizes: as after training on, into the same folder."""
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(Store, "write_layer", full_after(1))
        quantize(settings(own_bf16, tmp_path / "out", scheme="w8a8"))
    file = min(own_bf16.glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"what the model's files were before .* --restart begins anew"):
        quantize(settings(own_bf16, tmp_path / "out", scheme="w8a8"))
    anew = quantize(settings(own_bf16, tmp_path / "out", scheme="w8a8", restart=True))
    assert content(anew) == content(quantize(settings(own_bf16, tmp_path / "again", scheme="w8a8")))


def full_after(num_layers: int):
    write_layer, written = Store.write_layer, []

    def write(self, layer_idx, *args):
        written.append(layer_idx)
        if len(written) > num_layers:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_layer(self, layer_idx, *args)

    return write


@pytest.mark.parametrize("num_layers", [0, 2])
def test_a_full_disk_is_said_and_the_run_goes_on(small_bf16, tmp_path, monkeypatch, num_layers):
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"No space left.*same command to go on"):
        patch.setattr(Store, "write_layer", full_after(num_layers))
        quantize(settings(small_bf16, tmp_path / "out", scheme="w8a8"))
    assert not (tmp_path / "out").exists()
    resumed = quantize(settings(small_bf16, tmp_path / "out", scheme="w8a8"))
    assert content(resumed) == content(quantize(settings(small_bf16, tmp_path / "again", scheme="w8a8")))


def test_a_disk_that_is_too_small_is_said_first(small_bf16, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(CheckpointError, match=r"needs about [\d,]+ bytes more, and 1,000 are free"):
        quantize(settings(small_bf16, tmp_path / "out", scheme="w8a8"))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def own_bf16(small_bf16, tmp_path) -> Path:
    return Path(shutil.copytree(small_bf16, tmp_path / "own"))


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


def test_a_missing_tensor_is_named_before_anything_is_written(own_bf16, tmp_path):
    edit_tensors(own_bf16, lambda tensors: tensors.pop(UP))
    with pytest.raises(CheckpointError, match=f"missing tensor.*{UP}"):
        quantize(settings(own_bf16, tmp_path / "out", scheme="w8a8"))
    assert {path.name for path in tmp_path.iterdir()} == {"own"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_named(own_bf16, tmp_path, value):
    edit_tensors(own_bf16, lambda tensors: tensors[UP][5, 7].fill_(value))
    with pytest.raises(CheckpointError, match=f"{UP} holds 1 values that are not finite"):
        quantize(settings(own_bf16, tmp_path / "out", scheme="w8a8"))
    assert not (tmp_path / "out").exists()


def test_an_unknown_key_is_named(small_bf16, tmp_path):
    (tmp_path / "r.toml").write_text('[[process]]\ntype = "linear_quant"\nqconfg = 1\n')
    with pytest.raises(ConfigError, match="qconfg: got 1; allowed: no such key"):
        quantize(settings(small_bf16, tmp_path / "out", recipe=str(tmp_path / "r.toml")))
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_not_written_to(small_bf16, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="OUT"):
        quantize(settings(small_bf16, tmp_path / "out", scheme="w8a8"))
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_bytes_that_change_on_disk_are_found(small_bf16, tmp_path, monkeypatch):
    finish = running._finish

    def damage(job, store):
        file = sorted(store.model.glob("layer-*"))[2]
        raw = bytearray(file.read_bytes())
        raw[-9] ^= 1
        file.write_bytes(raw)
        finish(job, store)

    monkeypatch.setattr(running, "_finish", damage)
    with pytest.raises(CheckpointError, match="reads back unlike it was written"):
        quantize(settings(small_bf16, tmp_path / "out", scheme="w8a8"))
    assert not (tmp_path / "out").exists()


def test_qat_checkpoints_take_minmax_only(small_bf16, own_bf16, tmp_path):
    edit_json(own_bf16 / "config.json", quantization_aware={"bits": 4, "group_size": 128})
    others = [{"scheme": name} for name in ("w4a16", "w8a8", "fp8", "nvfp4", "w4a8")]
    for other in (*others, {"scheme": "w4a8", "method": "minmax", "w4a8_weights": "group"}):
        with pytest.raises(ConfigError, match=r"glm5 quantize .*/own .*/out --scheme w4a16 --method minmax"):
            quantize(settings(own_bf16, tmp_path / "out", **other))
    out = quantize(settings(own_bf16, tmp_path / "out", scheme="w4a16", method="minmax"))
    with pytest.raises(CheckpointError, match="is quantized already"):
        quantize(settings(out, tmp_path / "again", scheme="w4a16", method="minmax"))


def test_weights_on_the_grid_are_not_moved(own_bf16, tmp_path):
    edit_tensors(own_bf16, snap)
    for scheme in ("w8a8", "fp8", "nvfp4", "w4a8", "w4a16"):
        with pytest.raises(ConfigError, match="lies on an int4 grid already"):
            quantize(settings(own_bf16, tmp_path / "out", scheme=scheme))
    other_groups = tmp_path / "own" / "groups.toml"
    other_groups.write_text(
        '[[process]]\ntype = "linear_quant"\ninclude = ["*mlp.experts.*"]\n'
        'qconfig.weight = { scope = "per_group", dtype = "int4", method = "minmax", ext = { group_size = 64 } }\n'
    )
    with pytest.raises(ConfigError, match="lies on an int4 grid already"):
        quantize(settings(own_bf16, tmp_path / "out", recipe=str(other_groups)))
    other_groups.unlink()
    assert [each.name for each in tmp_path.iterdir()] == ["own"], "known before anything is written"
    out = quantize(settings(own_bf16, tmp_path / "out", scheme="w4a16", method="minmax"))
    before, after = read_tensors(own_bf16), read_tensors(out)
    codes = after[UP.replace("weight", "weight")]
    low, high = (codes & 15).to(torch.int8), (codes >> 4).to(torch.int8)
    both = torch.stack([low, high], -1).flatten(-2)
    both = torch.where(both > 7, both - 16, both).double()
    scale = after[UP.replace("weight", "weight_scale")].double().repeat_interleave(128, -1)
    assert torch.equal((both * scale).float().to(torch.bfloat16), before[UP])
