"""All measurements of a machine in parts: which there are, what is left when time is short, what is recorded."""

import json
import select
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from glm5.bench.all import run as module
from glm5.bench.all.commands import parts, size_of
from glm5.bench.all.record import entry, table, write
from glm5.bench.all.work import Work
from glm5.cli.main import main
from glm5.common.errors import ConfigError, GlmError, UsageError
from glm5.config.bench_all import BenchAllConfig

STEPS = {
    "decode_ms": {"1": 6.54321},
    "decode_ms_by_context": {"32768": 7.5},
    "prefill_ms": 61.0,
    "prefill_tok_s": 25123.456,
    "mtp_tok_s": 281.0,
    "simulated_acceptance": 2.99,
    "ready_s": 41.5,
    "kv_tokens": 561000,
    "date": "2026-11-22",
    "machine": {"device": "a GPU"},
    "engine": {},
}
SECONDS = 60  # an upper limit for what takes a moment
TIMES = {"output_throughput": 80.0, "steady_output_throughput": None, "mean_ttft_ms": 90.0, "p99_ttft_ms": 95.0}
RUN = {**TIMES, "mean_tpot_ms": 7.0, "p99_itl_ms": 9.0, "completed": 8, "failed": 0}
RUN |= {"first_wave": {"mean_ttft_ms": 91.0}, "after_first_wave": {}}
TINY = "--preset tiny --num-hidden-layers 2 --tensor-parallel-size 1 --max-concurrency 1 --batch 1 2 --context 96"
TINY += " --input-len 24 --output-len 12 --requests 2 --engine max-model-len=192"


@pytest.mark.parametrize(
    ("gpus", "name", "layers"),
    [(8, "whole_tp8", 78), (4, "half_tp4", 39), (2, "quarter_tp2", 20), (1, "eighth_tp1", 10)],
)
def test_fewer_gpus_have_fewer_layers(gpus, name, layers):
    size = size_of(BenchAllConfig(), gpus)
    assert (size.name, size.preset, size.gpus, size.layers) == (name, "glm-5", gpus, layers)


def test_parts_are_commands_of_this_package():
    settings = BenchAllConfig()
    size = size_of(settings, 8)
    every = parts(settings, size, kernels=True)
    assert [part.name for part in every] == [
        "steps",
        *(f"serve-{n}" for n in (1, 8, 16, 32, 64, 128)),
        "shared",
        "kernels",
    ]
    steps = " ".join(every[0].command)
    for flags in ("--preset glm-5 ", "--simulate-acceptance 2.99", "--output-len 256", "--kv-cache-dtype=fp8"):
        assert flags in steps
    assert "--simulate-acceptance" not in " ".join(every[-2].command)
    assert "--max-concurrency 128 --num-prompts 1024" in " ".join(every[-3].command)


def test_what_is_done_is_recorded_beside_other_entries(tmp_path):
    settings = BenchAllConfig(max_concurrency=(1, 8))
    size = size_of(settings, 4)
    every, work = parts(settings, size, kernels=False), Work(tmp_path, size, "abc")
    for part, content in zip(every, (STEPS, {"runs": [RUN], "partial": False}), strict=False):
        work.begin(part)
        work.file(part).write_text(json.dumps(content))
    found = entry(every, work)
    assert (found["preset"], found["commit"]) == ("glm-5", "abc")
    assert found["missing"] == ["serve-8", "shared"]
    assert found["decode_ms"] == {"1": 6.543}
    assert found["serve"]["1"] == {
        "output_tok_s": 80.0,
        "steady_output_tok_s": None,
        "ttft_ms": 90.0,
        "ttft_first_wave_ms": 91.0,
        "ttft_after_ms": None,
        "ttft_p99_ms": 95.0,
        "tpot_ms": 7.0,
        "itl_p99_ms": 9.0,
        "requests": 8,
        "partial": False,
        "failed": 0,
    }
    assert "| 1 | 80.0 | 90.0 | 91.0 | - | 7.0 | 9.0 |" in table(found)
    path = tmp_path / "all.json"
    write(path, "whole_tp8", {"projected": True})
    write(path, size.name, found)
    assert set(json.loads(path.read_text())) == {"whole_tp8", "half_tp4"}


class Called(list):
    """In place of commands: writes their files."""

    def __call__(self, command, _ends, _server=None):
        self.append(command)
        content = STEPS if command[1] == "latency" else {"runs": [RUN], "partial": False}
        Path(command[-1]).write_text(json.dumps(content))


def short_of_time(folder, **changes):
    files = {"json": str(folder / "all.json"), "work": str(folder), "preset": "tiny", "commit": "abc"}
    sizes = {"tensor_parallel_size": 8, "time_limit": 190, "max_concurrency": (128,), "requests": 8}
    return BenchAllConfig(**(files | sizes | changes))


def recorded(folder):
    return json.loads((folder / "all.json").read_text())["whole_tp8"]


@pytest.fixture
def called(monkeypatch):
    """Commands of parts, which are not run."""
    commands = Called()
    monkeypatch.setattr(module, "_call", commands)
    monkeypatch.setattr(module, "_running_server", lambda _command, _port, _ends: nullcontext())
    return commands


def test_what_does_not_fit_into_the_time_is_done_next_time(tmp_path, called, capsys):
    settings = short_of_time(tmp_path, time_limit=340)
    assert module.run(settings, tmp_path / "kernels") == 3
    assert [command[1] for command in called] == ["latency"]
    assert capsys.readouterr().out.endswith("\nnot done yet: serve-128; the same command goes on\n")
    assert module.run(settings, tmp_path / "kernels") == 0
    assert [command[1] for command in called] == ["latency", "serve"]


def test_what_fits_into_no_run_is_said_with_the_limit_that_it_needs(tmp_path, called, capsys):
    settings = short_of_time(tmp_path)
    long = "expected to take longer than --time-limit 190: serve-128 340 s; give at least 340"
    assert module.run(settings, tmp_path / "kernels") == 3
    assert f"not done yet: serve-128; {long}, and the same command goes on\n" in capsys.readouterr().out
    with pytest.raises(UsageError, match=f"^nothing could be begun; {long}$"):
        module.run(settings, tmp_path / "kernels")
    assert module.run(short_of_time(tmp_path, time_limit=340), tmp_path / "kernels") == 0
    assert [command[1] for command in called] == ["latency", "serve"]


def test_nothing_is_begun_of_which_no_part_fits(tmp_path, called):
    long = "longer than --time-limit 60: steps 180 s, serve-128 340 s; give at least 340"
    with pytest.raises(UsageError, match=f"^nothing could be begun; expected to take {long}$"):
        module.run(short_of_time(tmp_path, time_limit=60), tmp_path / "kernels")
    assert called == []


def test_results_of_another_commit_or_command_are_measured_anew(tmp_path, called):
    done = {"time_limit": 1000, "max_concurrency": (1,)}
    again = []
    for change in ({}, {"commit": "def"}, {"input_len": 99}, {"preset": "nano"}, {}, {"requests": 3}):
        assert module.run(short_of_time(tmp_path, **(done | change)), tmp_path / "kernels") == 0
        again.append([command[1] for command in called])
        called.clear()
        assert recorded(tmp_path)["missing"] == []
        assert recorded(tmp_path)["commit"] == change.get("commit", "abc")
    assert again == [["latency", "serve"]] * 5 + [["serve"]]
    assert module.run(short_of_time(tmp_path, **done, requests=3), tmp_path / "kernels") == 0
    assert called == []


def test_results_of_another_commit_are_not_recorded_as_of_this_one(tmp_path, called):
    module.run(short_of_time(tmp_path, time_limit=1000), tmp_path / "kernels")
    assert recorded(tmp_path).keys() >= {"decode_ms", "serve"}
    assert module.run(short_of_time(tmp_path, commit="def"), tmp_path / "kernels") == 3
    found = recorded(tmp_path)
    assert (found["commit"], found["missing"]) == ("def", ["serve-128"])
    assert "serve" not in found


def test_what_is_done_is_written_to_another_file_too(tmp_path, called):
    module.run(short_of_time(tmp_path, time_limit=1000), tmp_path / "kernels")
    other = tmp_path / "other.json"
    assert module.run(short_of_time(tmp_path, json=str(other)), tmp_path / "kernels") == 0
    assert other.read_bytes() == (tmp_path / "all.json").read_bytes()
    assert len(called) == 2


def test_what_was_cut_short_is_recorded_and_done_again(tmp_path, called):
    settings = short_of_time(tmp_path)
    size = size_of(settings, 8)
    every, work = parts(settings, size, kernels=False), Work(tmp_path / "whole_tp8", size, "abc")
    work.folder.mkdir()
    work.begin(every[0])
    work.file(every[0]).write_text(json.dumps(STEPS | {"partial": True}))
    found = entry(every, work)
    assert found["prefill_ms"] == 61.0
    assert found["missing"] == ["steps", "serve-128"]
    assert module.run(settings, tmp_path / "kernels") == 3
    assert [command[1] for command in called] == ["latency"]
    assert recorded(tmp_path)["missing"] == ["serve-128"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read as results: Expecting property"), ("[1]", "holds no JSON object"), (None, "Is a directory")],
)
def test_results_that_are_none_are_refused_before_anything_is_measured(tmp_path, called, content, message):
    path = tmp_path / "all.json"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=f"^{path} .*{message}.*; mend it, or move it away$"):
        module.run(short_of_time(tmp_path), tmp_path / "kernels")
    assert content is None or path.read_text() == content
    assert called == []


@pytest.mark.parametrize(("flag", "message"), [("--json", "there is no folder"), ("--work", "cannot write to")])
def test_places_that_cannot_be_written_to_are_refused_first(tmp_path, called, capsys, flag, message):
    (tmp_path / "file").write_text("")
    places = {"--json": tmp_path / "all.json", "--work": tmp_path / "work"} | {flag: tmp_path / "file" / "there"}
    flags = [word for name, place in places.items() for word in (name, str(place))]
    assert main(["bench", "all", *TINY.split(), *flags]) == 2
    assert f"glm5: error: {flag}: {message} {tmp_path / 'file'}" in capsys.readouterr().err
    assert called == []


def test_a_part_ends_with_the_server_that_it_measures(monkeypatch):
    waits = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(module, "_start", lambda _command: waits)
    with subprocess.Popen([sys.executable, "-c", ""]) as server:
        server.wait()
        with pytest.raises(GlmError, match="glm5 serve has ended"):
            module._call(["bench", "serve"], 1e12, server)
    assert waits.poll() is not None
    waits.stdin.close()


ORPHAN = """
import os, signal
from glm5.bench.all import run
run._start(["generate", "nowhere"])  # which reads its standard input, and that does not end
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_begun_ends_with_a_run_that_was_killed():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.wait(SECONDS) == -signal.SIGKILL
        ended, _, _ = select.select([process.stderr], [], [], SECONDS)  # both held it open
        assert ended
        assert process.stderr.read() == b""


@pytest.mark.slow
def test_a_part_that_fails_is_an_error_and_leaves_no_result(tmp_path, capsys):
    flags = ["--json", str(tmp_path / "all.json"), "--work", str(tmp_path), "--time-limit", "2000"]
    assert main(["bench", "all", *TINY.split(), *flags, "--engine", "kv-cache-memory-bytes=1"]) == 1
    assert "glm5 bench latency ended with code 1" in capsys.readouterr().err
    assert not (tmp_path / "all.json").exists()


@pytest.mark.slow
def test_the_command_measures_steps_and_a_server(tmp_path):
    flags = ["--json", str(tmp_path / "all.json"), "--work", str(tmp_path), "--time-limit", "2000"]
    assert main(["bench", "all", "--preset", "tiny", "--tp", "1", *flags]) == 0
    found = json.loads((tmp_path / "all.json").read_text())["eighth_tp1"]
    assert found["missing"] == []
    assert found["serve"]["1"]["requests"] == 4
    assert found["decode_ms"].keys() == {"1", "8"}


@pytest.mark.slow
def test_a_server_that_ends_is_an_error():
    server = module._running_server(["serve", "/nowhere"], 9, 1e12)
    with pytest.raises(GlmError, match="glm5 serve ended before"), server:
        pass
