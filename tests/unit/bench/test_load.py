"""The benchmark of loading: what it writes is whole or not there, and is used again."""

import os
import re
import signal
import sys

import pytest

from glm5.bench.load import __main__ as bench
from glm5.checkpoint.init import RandomTensors
from glm5.common.errors import GlmError, UsageError
from glm5.config.presets import preset

WIDE = {  # two ranks have whole blocks of every FP8 weight, or share one
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run over a small model, with SIGTERM as it was afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(bench, "sized", lambda _gigabytes: preset("tiny").replace(**WIDE))
    monkeypatch.setattr(sys, "argv", ["load", "--folder", str(tmp_path / "ck"), "--ranks", "1", "2", "--device", "cpu"])
    yield bench.main
    signal.signal(signal.SIGTERM, before)


def test_a_run_that_is_cut_off_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(RandomTensors, "blocks", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert list(tmp_path.iterdir()) == []


def test_a_line_for_each_number_of_ranks_and_a_checkpoint_that_is_used_again(run, tmp_path, monkeypatch, capfd):
    rate, measured = bench._rate, list[float]()

    def once(folder, ranks, device):
        """By real processes of two ranks; others are as fast."""
        if ranks == 2 and not measured:
            measured.append(rate(folder, ranks, device))
        return 1.0 if ranks == 1 else measured[0]

    monkeypatch.setattr(bench, "_rate", once)
    assert run() == 0
    reported = capfd.readouterr().out
    assert "GB in 1 files, written at " in reported
    rates = r"disk +\d+\.\d\d GB/s, only reading +\d+\.\d\d  memory +\d+\.\d\d GB/s, only reading +\d+\.\d\d$"
    assert re.findall(rf"^loading by +(\d+) on cpu +{rates}", reported, re.MULTILINE) == ["1", "2"]
    written = {path.name: path.stat().st_ino for path in (tmp_path / "ck").iterdir()}
    monkeypatch.setattr(bench, "_rate", lambda *_: 1.0)
    assert run() == 0
    assert "there already" in capfd.readouterr().out
    assert {path.name: path.stat().st_ino for path in (tmp_path / "ck").iterdir()} == written
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_a_checkpoint_of_another_size_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_rate", lambda *_: 1.0)
    assert run() == 0
    monkeypatch.setattr(bench, "sized", lambda _gigabytes: preset("tiny").replace(**WIDE | {"n_routed_experts": 8}))
    with pytest.raises(UsageError, match=r"--folder: .*ck holds a checkpoint of .* GB, and --gigabytes 8 asks for one"):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_a_rank_that_fails_is_told(run, monkeypatch):
    monkeypatch.setattr(bench, "_read_rate", lambda files, _threads: os.truncate(files[0], 9) or 1.0)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--ranks", "1"])
    with pytest.raises(GlmError, match="loading by 1 failed"):
        run()
