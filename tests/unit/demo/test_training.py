"""Training resumes exactly, after Ctrl-C and after kill -9; a state that is no use is left aside."""

import signal
import subprocess
import sys

import pytest
import torch

from glm5.common.errors import CheckpointError
from glm5.config.train import read_recipe
from glm5.demo.run import RECIPE, train
from glm5.train.data.questions import KINDS
from glm5.train.metrics import read_metrics
from glm5.train.step import Step

STEPS = 2
STAGES = read_recipe(RECIPE).stage
SETTINGS = [
    'model.preset="tiny"',
    "model.config.vocab_size=768",
    "checkpoints.every=1",
    "checkpoints.held_out=1",
    *(
        f"stage.{number}.{setting}"
        for number in range(len(STAGES))
        for setting in (f"steps={STEPS}", "lr_warmup_steps=0", "sequences=1")
    ),
]
# Runs the same training as `trained`, says when a state is on disk, and waits there to be killed.
CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.unit.demo import test_training as t
from glm5.train.state import Store
write = Store.write
def written(self, position, *args, **kwargs):
    write(self, position, *args, **kwargs)
    if position.stage == 2:
        print("saved", flush=True)
        sys.stdin.read()
Store.write = written
t.trained(Path(sys.argv[1]))
"""


def trained(out):
    return (train(out, SETTINGS) / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("straight") / "out")


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, straight, monkeypatch):
    """Interrupted in the last stage; up to then the stages have trained what they say."""
    run, calls = Step.run, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == STEPS * len(STAGES) - 1:
            signal.raise_signal(signal.SIGINT)
        return run(self, *args)

    monkeypatch.setattr(Step, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path)
    assert not (tmp_path / "model").exists()
    losses = {
        record["stage"]: {"loss", "index", "mtp"} & record.keys()
        for record in read_metrics(tmp_path / "training")
        if "held out" not in record
    }
    assert losses["dense"] == {"loss"}
    assert "index" in losses["warmup"]
    assert losses["sparse"] == {"loss", "index", "mtp"}
    monkeypatch.setattr(Step, "run", run)
    assert trained(tmp_path) == straight
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_killed_and_resumed_equals_uninterrupted(tmp_path, straight, pytestconfig):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=pytestconfig.rootpath
    ) as child:
        assert child.stdout.readline() == "saved\n"
        child.kill()
    assert not (tmp_path / "model").exists()
    assert trained(tmp_path) == straight


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a state", "of other settings"])
def test_a_state_that_is_no_use_is_left_aside(tmp_path, straight, content, caplog):
    state = tmp_path / "training" / "state.pt"
    state.parent.mkdir()
    if isinstance(content, bytes):
        state.write_bytes(content)
    else:
        torch.save({"recipe": content, "position": {}, "threads": 1}, state)
    assert trained(tmp_path) == straight
    assert "training starts anew" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/out: cannot be written .*choose another folder with --out"):
        trained(tmp_path / "file" / "out")


def test_every_kind_of_question_is_trained_in_every_stage():
    for stage in STAGES:
        assert {task for source in stage.data for task in source.tasks} == set(KINDS)
