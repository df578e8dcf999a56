"""FP8 to BF16 and back, against a model that was loaded and saved."""

import shutil

import pytest
import torch

from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.cli.main import main
from tests.support.checkpoints import ragged, read_tensors
from tests.support.models import random_model


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    path = tmp_path_factory.mktemp("convert") / "fp8"
    save(random_model(2, ragged()), path, dtype="fp8")
    return path


def same(one, other) -> bool:
    a, b = read_tensors(one), read_tensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


def test_fp8_to_bf16_and_back(fp8, tmp_path):
    assert main(["convert", str(fp8), str(tmp_path / "bf16"), "--dtype", "bfloat16"]) == 0
    save(load(fp8, dtype="bfloat16"), tmp_path / "loaded")
    assert same(tmp_path / "bf16", tmp_path / "loaded")
    assert main(["convert", str(tmp_path / "bf16"), str(tmp_path / "again"), "--dtype", "fp8"]) == 0
    save(load(tmp_path / "bf16"), tmp_path / "quantized", dtype="fp8")
    assert same(tmp_path / "again", tmp_path / "quantized")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "quantized" / "config.json").read_text()


def test_fp8_that_stays_is_copied(fp8, tmp_path):
    assert main(["convert", str(fp8), str(tmp_path / "copy"), "--dtype", "fp8", "--max-shard-gb", "0.0001"]) == 0
    assert same(fp8, tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("dtype", ["fp8", "float32"])
def test_a_weight_that_is_no_number_is_refused(dtype, tmp_path, capsys):
    model = random_model(3, ragged())
    model.model.layers[1].self_attn.q_a_proj.weight.data[0, 0] = float("nan")
    save(model, tmp_path / "broken")
    assert main(["convert", str(tmp_path / "broken"), str(tmp_path / "out"), "--dtype", dtype]) == 1
    assert "model.layers.1.self_attn.q_a_proj.weight holds 1 values that are not finite" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["broken"]


def test_weights_are_replaced_only_when_told(fp8, tmp_path, capsys):
    line = ["convert", str(fp8), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(line) == 0
    assert main(line) == 1
    assert "out holds weights, 1 file (model.safetensors); use them as they are" in capsys.readouterr().err
    assert main([*line[:-1], "fp8", "--overwrite"]) == 0
    assert same(tmp_path / "out", fp8)


@pytest.mark.parametrize("within", ["", "sub"])
def test_what_is_read_is_not_written_over(within, fp8, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(fp8, model)
    assert main(["convert", str(model), str(model / within), "--dtype", "bfloat16"]) == 1
    assert "which is the model that is read or within it" in capsys.readouterr().err
    assert main(["quantize", str(model), str(model / "sub"), "--scheme", "w8a8"]) == 1
    assert "which is the model that is read or within it" in capsys.readouterr().err
    assert same(model, fp8)
    assert not (model / "sub").exists()
