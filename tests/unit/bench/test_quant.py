"""`python -m glm5.bench.quant` on a few small experts: tables, and stacks that give what loops give; a whole layer."""

import sys

import pytest

from glm5.bench.quant import layer
from glm5.bench.quant.__main__ import main


def test_both_tables(monkeypatch, capsys):
    size = [
        "--device",
        "cpu",
        "--dtype",
        "float64",
        "--experts",
        "3",
        "--outputs",
        "4",
        "--inputs",
        "128",
        "--tokens",
        "5",
    ]
    monkeypatch.setattr("glm5.bench.quant.__main__.ROWS", 8)
    monkeypatch.setattr(sys, "argv", ["bench", *size])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(("channel ", "group "))]) == 6
    assert [line.endswith("every bit") for line in lines[-8:]] == [True] * 8


def test_only_some(monkeypatch, capsys):
    size = ["--device", "cpu", "--experts", "2", "--outputs", "4", "--inputs", "128"]
    monkeypatch.setattr(sys, "argv", ["bench", *size, "--only", "gptq", "--loop", "1"])
    assert main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:]] == ["gptq"]
    monkeypatch.setattr(sys, "argv", ["bench", "--dtype", "float16"])
    with pytest.raises(SystemExit):
        main()


def test_a_layer_goes_through_the_pipeline(tmp_path, capsys):
    given = ["--preset", "tiny", "--samples", "2", "--sample-len", "24", "--device", "cpu", "--gpus", "4"]
    assert layer.main([str(tmp_path), *given]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "w4a8" / "quantization.json").is_file()
    assert "75 layers:" in said
    assert "on 4 of one process" in said
