"""A checkpoint trained with int4 in view and what is made of it, as reports and other commands speak of them."""

import json
import shutil

import pytest

from glm5.checkpoint.inspect import inspect
from glm5.cli.main import main
from glm5.config.quantize import QuantizeConfig
from glm5.quantize.run import quantize
from tests.support.checkpoints import edit_json, edit_tensors, snap


@pytest.fixture(scope="module")
def trained(small_bf16, tmp_path_factory):
    """(masters, what is packed of them)"""
    folder = tmp_path_factory.mktemp("trained")
    masters = shutil.copytree(small_bf16, folder / "masters")
    edit_json(masters / "config.json", quantization_aware={"bits": 4, "group_size": 128})
    given = {"model": str(masters), "out": str(folder / "int4"), "scheme": "w4a16", "method": "minmax"}
    return masters, quantize(QuantizeConfig.model_validate(given | {"held_out_tokens": 16, "device": "cpu"}))


def test_the_report_says_what_it_compares_with(trained):
    notes = json.loads((trained[1] / "quantization.json").read_text())["notes"]
    assert notes[0].startswith("measured on random ids")
    assert "the original here is the unrounded masters" in notes[1]


def test_quant_names_a_command_that_is_there(trained, tmp_path, capsys):
    masters = trained[0]
    assert main(["quant", "--model_path", str(masters), "--save_path", str(tmp_path / "o"), "--quant_type", "w8a8"])
    said = f"glm5 quantize {masters} {tmp_path / 'o'} --scheme w4a16 --method minmax --target ascend"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("is_marked", [True, False])
def test_convert_to_fp8_names_what_keeps_every_bit(is_marked, small_bf16, tmp_path, capsys):
    model = shutil.copytree(small_bf16, tmp_path / "model")
    if is_marked:
        edit_json(model / "config.json", quantization_aware={"bits": 4, "group_size": 128})
    else:
        edit_tensors(model, snap)
    assert main(["convert", str(model), str(tmp_path / "out"), "--dtype", "fp8"]) == 1
    assert f"glm5 quantize {model} {tmp_path / 'out'} --scheme w4a16 --method minmax" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(model), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0


def test_inspect_knows_the_key_and_counts_scales(trained):
    for folder in trained:
        report = inspect(folder)
        assert report.unknown_config_keys == []
        assert "unexpected" not in report.bytes_by_part
    assert report.bytes_by_part["experts"] == report.parameters.by_part["experts"] * (4 + 32 / 128) / 8


def test_merging_into_int4_says_what_to_do(trained, tmp_path, capsys):
    assert main(["merge", str(trained[1]), "adapter", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "merge into the bfloat16 checkpoint that it was made of" in said
    assert "--adapter adapter" in said
