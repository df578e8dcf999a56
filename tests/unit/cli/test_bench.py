"""`glm5 bench throughput` and `latency` from the command line; `bench serve` is found."""

import json

import pytest
import torch

from glm5.bench import measure, workload
from glm5.cli.main import main


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(workload, "PROMPT_LENGTHS", (4, 12))
    monkeypatch.setattr(workload, "OUTPUT_LENGTHS", (2, 6))
    monkeypatch.setattr(measure, "thread_counts", lambda: [1])


def test_throughput_against_transformers(checkpoint, tmp_path, capsys):
    argv = ["bench", "throughput", "--model", checkpoint, "--requests", "2", "--num-iters", "1", "--device", "cpu"]
    assert main([*argv, "--against", "transformers", "--json", str(tmp_path / "r.json")]) == 0
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert found["ratio"] > 0
    assert found["ours"]["output_tokens"] == found["peer"]["output_tokens"] == found["workload"]["output_tokens"]
    assert f"model          {checkpoint}\n" in shown
    assert f"ratio: {found['ratio']:.2f} times" in shown


def test_an_interrupt_leaves_nothing(checkpoint, tmp_path, monkeypatch, capsys):
    def press(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "run_in_turn", press)
    assert (
        main(["bench", "latency", "--model", checkpoint, "--device", "cpu", "--json", str(tmp_path / "r.json")]) == 130
    )
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in capsys.readouterr().err


BENCHES = (
    "all",
    "throughput",
    "latency",
    "serve",
    "frontend",
    "kernels",
    "quantize",
    "rl",
    "off-policy",
    "hybrid",
    "transition",
)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ("bench", 2, "bench needs one more word; allowed: " + ", ".join(BENCHES)),
        ("bench latencie", 2, "no command 'bench latencie'; did you mean bench latency?"),
        ("bench throughput", 2, "the following arguments are required: --model; see  glm5 bench throughput --help"),
        ("bench latency --model m --requests 0", 2, "--num-prompts: got '0'; allowed: at least 1"),
        ("bench latency --model m --against vllm", 2, "--against: got 'vllm'; allowed: 'transformers'"),
        ("bench latency --model m --json no/where/x", 2, "--json: there is no folder no/where"),
        ("bench serve --port 0", 2, "--port: got '0'; allowed: at least 1"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(argv, code, message, capsys):
    assert main(argv.split()) == code
    assert capsys.readouterr().err == f"glm5: error: {message}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where that is missing")
def test_kernels_need_a_gpu(capsys, tmp_path):
    assert main(["bench", "kernels", "--only", "router"]) == 1
    assert capsys.readouterr().err.startswith("glm5: error: glm5 bench kernels needs an NVIDIA GPU and Triton; ")
    assert main(["bench", "kernels", "--json", str(tmp_path / "none" / "x.json")]) == 2
    assert "--json: there is no folder" in capsys.readouterr().err
    assert main(["bench", "kernels", "--tuned", str(tmp_path / "x.json")]) == 2
    assert "add --tune" in capsys.readouterr().err
