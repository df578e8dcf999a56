"""The server without a model is measured from end to end, and every token is asked for and counted."""

import json

from glm5.cli.main import main


def test_a_short_run(tmp_path, capsys):
    out = tmp_path / "frontend.json"
    command = "bench frontend --max-concurrency 3 --num-prompts 4 --random-output-len 12 --step-rate 200"
    assert main([*command.split(), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["requests"], found["tokens"]) == (4, 48)
    assert 4 <= found["chunks"] <= 48 + 4  # the last chunk may be without text
    assert found["server_cpu_s"] > 0
    assert found["chunks_per_core_s"] == found["chunks"] / found["server_cpu_s"]
    assert "chunks/s per core" in capsys.readouterr().out


def test_a_folder_without_the_package(tmp_path, capsys):
    assert main(["bench", "frontend", "--checkout", str(tmp_path)]) != 0
    assert "has no folder glm5" in capsys.readouterr().err
