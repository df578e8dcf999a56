"""A stage is a process: one that fails or is killed is named, one that is stopped ends the run, a done one is kept."""

import os
import subprocess
import sys

import pytest

from glm5.common.errors import TrainingError
from glm5.post_train import process, run


def instead(monkeypatch, code):
    """Stages are this program."""
    begin = subprocess.Popen

    def popen(command, **options):
        assert command[:3] == [sys.executable, "-m", "glm5"]
        return begin([sys.executable, "-S", "-c", code], **options)

    monkeypatch.setattr(process.subprocess, "Popen", popen)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "raise SystemExit(1)",
            r"stage base \(glm5 train\): its process ended with exit code 1; .*The same command goes on",
        ),
        ("import os; os.kill(os.getpid(), 9)", r"stage base \(glm5 train\): its process was killed by SIGKILL"),
    ],
)
def test_a_stage_that_ends_is_named(plan, monkeypatch, code, says):
    instead(monkeypatch, code)
    with pytest.raises(TrainingError, match=says):
        run.run_stage(plan().stages[0])


def test_a_stage_that_was_stopped_stops_the_run(plan, monkeypatch):
    instead(monkeypatch, "raise SystemExit(130)")
    with pytest.raises(KeyboardInterrupt):
        run.run_stage(plan().stages[0])


def test_ctrl_c_reaches_the_stage_once_and_is_waited_for(plan, monkeypatch, tmp_path):
    """The stage answers SIGTERM by writing a file; the control is that it is there when the interrupt comes out."""
    told = tmp_path / "told"
    code = f"""
import os, signal
signal.signal(signal.SIGTERM, lambda *_: (open({str(told)!r}, "a").write("told"), os._exit(143)))
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""
    instead(monkeypatch, code)
    with pytest.raises(KeyboardInterrupt):
        run.run_stage(plan().stages[0])
    assert told.read_text() == "told"


def test_a_stage_ends_with_the_process_that_started_it():
    """A process begins a stage and is killed; the pipe that the stage holds closes only once the stage is gone, too."""
    read, write = os.pipe()
    stage = f"import os, signal; os.write({write}, b'up'); signal.pause()"
    code = f"""
import subprocess, sys
from glm5.post_train.process import run_glm5
begin = subprocess.Popen
subprocess.Popen = lambda _, **options: begin([sys.executable, "-S", "-c", {stage!r}], pass_fds=({write},), **options)
run_glm5([], "a stage")
"""
    starter = subprocess.Popen([sys.executable, "-c", code], pass_fds=(write,))
    os.close(write)
    assert os.read(read, 2) == b"up"
    starter.kill()
    starter.wait()
    assert os.read(read, 1) == b""
    os.close(read)


def test_a_finished_quantization_is_not_repeated(plan, monkeypatch):
    monkeypatch.setattr(process.subprocess, "Popen", None)
    stage = plan().stages[2]
    stage.made.mkdir(parents=True)
    (stage.made / "config.json").write_text("{}")
    (stage.made / "model.safetensors").write_bytes(b"12345")
    assert run.run_stage(stage)["size_bytes"] == 5
