"""Mistakes are told once, before anything is started."""

import pytest
import torch

from glm5.bench.all import run as module
from glm5.cli.main import main
from glm5.config.bench_all import BenchAllConfig


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Parts that would be started."""
    parts = []
    monkeypatch.setattr(module, "_measure", lambda missing, *_more: parts.extend(missing) or [])
    return parts


@pytest.fixture
def gpus(monkeypatch):
    """Sets how many GPUs this machine has."""
    return lambda number: monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


def reported(folder, flags, capsys):
    """Exit code and standard error of the command."""
    code = main(["bench", "all", "--json", str(folder / "all.json"), "--work", str(folder / "work"), *flags.split()])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 3", "--tensor-parallel-size: got 3, which does not divide this model's "),
        ("--num-hidden-layers 99", "--num-hidden-layers: got 99; allowed: 1 to 4"),
        ("--engine nonsense=3", "glm5 bench latency has no flag --nonsense; "),
        ("--engine quantization=fp8", "glm5 bench latency has no flag --quantization; "),
        ("--engine empty-kernel-cache", "glm5 serve has no flag --empty-kernel-cache; "),
        ("--engine kv-cache-dtype=fp9", "--kv-cache-dtype: got 'fp9'; allowed: "),
        ("--engine tensor-parallel-size=3", "--tensor-parallel-size: got 3, "),
        ("--engine max-model-len=2048", "--max-model-len: got 2048; allowed: up to 1024"),
        ("--engine max-model-len=100", "--context: got 512, "),
        ("--context 64 1025", "--context: got 1025, "),
        ("--input-len 2048", "--input-len: got 2048, "),
        ("--input-len 900 --output-len 130 --batch 1", "--output-len: got 130, behind prompts of 900 tokens; "),
    ],
)
def test_a_mistake_is_one_error(tmp_path, gpus, started, capsys, flags, message):
    gpus(0)
    code, error = reported(tmp_path, f"--preset tiny {flags}", capsys)
    assert code == 2
    assert error.startswith(f"glm5: error: {message}")
    assert error.count("\n") == 1
    assert started == []
    assert list(tmp_path.iterdir()) == []


def test_the_whole_model_needs_gpus(tmp_path, gpus, started, capsys):
    gpus(0)
    message = "glm-5 needs NVIDIA GPUs, and this machine has none; to try the command: --preset tiny"
    assert reported(tmp_path, "", capsys) == (2, f"glm5: error: --preset: {message}\n")
    assert reported(tmp_path, "--tp 8", capsys) == (2, f"glm5: error: --preset: {message}\n")
    assert started == []
    gpus(8)
    reported(tmp_path, "", capsys)
    assert {"steps", "serve-128", "shared"} <= {part.name for part in started}


def test_as_many_ranks_as_gpus(tmp_path, gpus, started, capsys):
    gpus(1)
    message = "--tensor-parallel-size: got 2; allowed: up to 1, as many GPUs as there are here"
    assert reported(tmp_path, "--preset tiny --tp 2", capsys) == (2, f"glm5: error: {message}\n")
    gpus(0)
    reported(tmp_path, "--preset tiny --tp 2", capsys)
    assert [part.name for part in started] == ["steps", "serve-1", "serve-8"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path, capsys):
    nowhere = tmp_path / "none"
    code, error = reported(tmp_path, f"--preset tiny --json {nowhere / 'a.json'}", capsys)
    assert (code, error) == (2, f"glm5: error: --json: there is no folder {nowhere}\n")
    assert not nowhere.exists()


@pytest.mark.parametrize("preset", ["tiny", "nano"])
def test_small_presets_have_defaults_that_fit(tmp_path, gpus, started, capsys, preset):
    gpus(0)
    reported(tmp_path, f"--preset {preset}", capsys)
    assert [part.name for part in started] == ["steps", "serve-1", "serve-8"]


def test_given_numbers_win_over_those_of_small_presets():
    settings = BenchAllConfig(preset="tiny", input_len=99)
    assert (settings.input_len, settings.context) == (99, (256, 512))
    assert BenchAllConfig().context == (32768, 131072)
