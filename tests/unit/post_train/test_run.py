"""A stage is a process: one that fails or is killed is named, one that is stopped ends the run, a done one is kept."""

import os
import subprocess
import sys

import pytest

from glm5.common.errors import TrainingError
from glm5.config.post_train import read_post_train
from glm5.post_train import process, run
from glm5.post_train.needs import Needs
from glm5.post_train.plan import Stage
from tests.unit.post_train.conftest import TEXT, WITH_REWARD


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


@pytest.fixture
def scripted(monkeypatch):
    """Stages and measurements are noted, and take no time."""
    did = []
    took = {"seconds": 1.0, "cpu_seconds": 1.0, "peak_bytes": 1, "size_bytes": 1}
    monkeypatch.setattr(run, "run_stage", lambda stage: did.append(f"run {stage.name}") or took)
    monkeypatch.setattr(run, "needs_of", lambda plan: {stage.name: Needs(None, None) for stage in plan.stages})

    def found(what, seeds):
        did.append(what)
        skills = {name: [1.0] * len(of) for name, of in seeds.items()}
        return {"skills": skills, "tokens": 1, "seconds": 1.0, "drafted": [1], "accepted": [1]}

    def measure(_, folder, seeds, *, is_quantized):
        return found(f"measure {folder.stem}{' quantized' if is_quantized else ''}", seeds)

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "measure_served", lambda _, folder, seeds, log: found(f"serve {folder.stem}", seeds))
    return did


def test_what_is_done_is_kept_what_is_asked_otherwise_is_measured_again_and_the_rest_is_redone(tmp_path, scripted):
    file = tmp_path / "recipe.toml"
    file.write_text(TEXT)

    def did(*settings, restart_from=None):
        scripted.clear()
        given = read_post_train(file, (f'out="{tmp_path / "run"}"', *settings))
        assert run.post_train(*given, restart_from)
        return list(scripted)

    first = ["run base", "measure base", "run rl", "measure rl", "run w4a8", "serve w4a8"]
    assert did() == first
    assert did() == []
    assert did("evaluation.margin=0.5") == []
    assert did("evaluation.tasks=3") == ["measure base", "measure rl", "serve w4a8"]
    assert did("evaluation.tasks=3", restart_from="rl") == first[2:]
    with pytest.raises(
        TrainingError, match=r"stage rl was begun with another recipe: steps was 2 and is 3; .*--restart"
    ):
        did("stage.1.recipe.steps=3")
    for name in ("rl.done.json", "rl.skills.json"):
        file_of_run = tmp_path / "run" / name
        good = file_of_run.read_text()
        other = good.replace('"seeds":', '"seeds": 5, "were":') if "seeds" in good else "7"
        for bad in ("{", "[]", "5", other, "[" * 100_000, good.replace("1.0", "NaN"), good.replace("1.0", '"x"')):
            file_of_run.write_text(bad)
            with pytest.raises(TrainingError, match=rf"{name}: cannot be understood .*; delete it"):
                did("evaluation.tasks=3")
        file_of_run.write_text(good)
    assert did("evaluation.tasks=3") == []


def test_a_restart_that_is_killed_leaves_no_stage_that_is_older_than_its_start(tmp_path, scripted, monkeypatch):
    file = tmp_path / "recipe.toml"
    file.write_text(TEXT)
    given = read_post_train(file, (f'out="{tmp_path / "run"}"', "evaluation.tasks=3"))
    run.post_train(*given)
    delete, deleted = Stage.delete, []

    def killed(stage):
        if deleted:
            raise SystemExit
        deleted.append(stage.name)
        delete(stage)

    monkeypatch.setattr(Stage, "delete", killed)
    with pytest.raises(SystemExit):
        run.post_train(*given, "base")
    scripted.clear()
    run.post_train(*given)
    assert scripted == ["run w4a8", "serve w4a8"]


def test_a_reward_model_is_not_asked(tmp_path, scripted):
    file = tmp_path / "recipe.toml"
    file.write_text(WITH_REWARD)
    run.post_train(*read_post_train(file, (f'out="{tmp_path / "run"}"', "evaluation.tasks=3")))
    assert scripted == ["run base", "measure base", "run liking", "run rl", "measure rl", "run w4a8", "serve w4a8"]
