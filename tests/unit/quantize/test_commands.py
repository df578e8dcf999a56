"""`glm5 quantize` and `glm5 quant` as they are typed."""

import json

import pytest

from glm5.cli.main import main
from tests.support.checkpoints import read_tensors

BRIEF = ["--sample-len", "16", "--num-samples", "2", "--held-out-tokens", "0", "--device", "cpu", "--min-tokens", "2"]


def test_the_articles_command_line_writes_ascends_files(small_bf16, tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--model_path", str(small_bf16), "--save_path", "out", "--model_type", "GLM-5", "--quant_type", "w8a8"]
    with caplog.at_level("INFO", "glm5"):
        # The command sets up logging of its own, which does not propagate.
        assert main(["quant", *words, "--trust_remote_code", "True", "--device", "cpu"]) == 0
    described = json.loads((tmp_path / "out" / "quant_model_description.json").read_text())
    assert described["model_quant_type"] == "W8A8_DYNAMIC"
    assert "model.layers.1.self_attn.o_proj.weight_offset" in read_tensors(tmp_path / "out")


def test_msmodelslims_own_recipe_runs(small_bf16, tmp_path, request):
    recipe = request.path.parent / "upstream.yaml"
    line = ["quantize", str(small_bf16), str(tmp_path / "out"), "--recipe", str(recipe), "--upstream-faithful", *BRIEF]
    assert main(line) == 0
    described = json.loads((tmp_path / "out" / "quant_model_description.json").read_text())
    assert described["model.layers.2.mlp.experts.0.up_proj.weight"] == "W4A8_DYNAMIC"
    assert described["model.layers.1.self_attn.indexer.wk.weight"] == "FLOAT"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scheme", "w4a8", "--recipe", "r.toml"], "either --scheme or --recipe; got both"),
        (["--scheme", "w5a8"], "--scheme: got 'w5a8'; allowed: 'w8a8', 'w4a8', 'w4a16', 'fp8', 'nvfp4' or 'nvfp4-fp8'"),
        (["--recipe", "missing.toml"], "missing.toml: cannot be read: No such file"),
        (["--calibration", "missing.txt"], "text needs a tokenizer"),
        (["--devcie", "cpu"], "did you mean --device?"),
    ],
)
def test_mistakes_are_named(small_bf16, tmp_path, capsys, words, said):
    assert main(["quantize", str(small_bf16), str(tmp_path / "out"), *words]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_experts_without_tokens_are_named(small_bf16, tmp_path, capsys):
    flags = ["--sample-len", "8", "--num-samples", "1", "--held-out-tokens", "0", "--device", "cpu"]
    assert main(["quantize", str(small_bf16), str(tmp_path / "few"), "--scheme", "w4a16", *flags]) == 0
    assert "saw fewer than 16 calibration tokens" in capsys.readouterr().err
    everyone = ["--calibrate-all-experts", *flags]
    assert main(["quantize", str(small_bf16), str(tmp_path / "all"), "--scheme", "w4a16", *everyone]) == 0
    assert "saw fewer" not in capsys.readouterr().err
    assert (tmp_path / "all" / "quantization.html").is_file()
