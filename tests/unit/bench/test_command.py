"""Benchmarks that `python -m` runs: what is wrong is one line and an exit code, and told before any work."""

import re
import runpy
import subprocess
import sys

import pytest
import torch

from glm5.bench.command import command, need_gpus
from glm5.common.errors import CheckpointError, GlmError

KERNELS = ("attention", "quantized", "collectives", "elementwise", "experts", "hopper", "linear", "preparation")
OF_GPUS = [*(f"kernels.{name}" for name in KERNELS), "steps", "steps.shared", "train memory"]
OF_GPUS += ["quant --device cuda", "load --folder nowhere --device cuda --ranks 2 1"]


ONE_LINE = r"glm5: error: .* NVIDIA GPU.*\n"


@pytest.mark.filterwarnings("ignore:.* found in sys.modules after import")  # by another test
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("line", OF_GPUS)
def test_a_machine_without_a_gpu_is_told_so(line, tmp_path, monkeypatch, capsys):
    name, *flags = f"glm5.bench.{line}".split()
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        runpy.run_module(name, run_name="__main__")
    assert left.value.code == 1
    assert re.fullmatch(ONE_LINE, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_process_says_nothing_else(tmp_path):
    requested = [sys.executable, "-m", "glm5.bench.steps"]
    done = subprocess.run(requested, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(ONE_LINE, done.stderr)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(CheckpointError("no such model"), 1, "glm5: error: no such model\n"), (KeyboardInterrupt(), 130, "\n")],
)
def test_errors_of_a_benchmark(error, code, line, capsys):
    def fail():
        raise error

    assert command(fail) == code
    assert capsys.readouterr().err == line
    assert command(lambda: 3) == 3


def test_as_many_gpus_as_ranks(monkeypatch):
    monkeypatch.setattr("glm5.bench.command.installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    need_gpus("this", 2)
    with pytest.raises(GlmError, match=r"^this needs 4 NVIDIA GPUs and Triton; this machine has 2 GPUs$"):
        need_gpus("this", 4)
