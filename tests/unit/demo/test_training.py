"""The demo trains by its recipe, resumes after Ctrl-C with the same bits, and leaves nothing but the model."""

import json
import signal

import pytest

from glm5.common.errors import CheckpointError
from glm5.config.train import read_recipe
from glm5.demo import run
from glm5.train.data.questions import KINDS
from glm5.train.step import Step

STAGE = """
[[stage]]
name = "{name}"
kind = "{kind}"
steps = 2
seq_len = 300
sequences = 1
lr = 1e-3

[[stage.data]]
kind = "questions"
tasks = ["copy", "sort"]
turns = {{ copy = 1 }}
max_words = 8
"""
TINY = """
name = "tiny"
threads = 1
[model]
preset = "tiny"
config = { vocab_size = 768 }
[losses]
mtp_depth = 1
[checkpoints]
held_out = 1
""" + "".join(STAGE.format(name=name, kind=kind) for name, kind in (("first", "pretrain"), ("second", "sft")))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(TINY)
    monkeypatch.setattr(run, "RECIPE", recipe)
    return recipe


def trained(out):
    return (run.train(out) / "model.safetensors").read_bytes()


def test_interrupted_and_resumed_equals_uninterrupted(tiny, tmp_path, monkeypatch):
    step, done = Step.run, []

    def interrupted(self, batches, lr):
        done.append(lr)
        if len(done) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, batches, lr)

    whole = trained(tmp_path / "whole")
    monkeypatch.setattr(Step, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut")
    assert not (tmp_path / "cut/model").exists()
    assert trained(tmp_path / "cut") == whole
    assert len(done) == 4
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["model"]
    defaults = json.loads((tmp_path / "cut/model/generation_config.json").read_text())
    assert defaults["temperature"] == run.GENERATION["temperature"]


def test_a_run_of_another_recipe_starts_anew(tiny, tmp_path, monkeypatch, caplog):
    def fails(self, batches, lr):
        raise RuntimeError("stop here")

    monkeypatch.setattr(Step, "run", fails)
    with pytest.raises(RuntimeError, match="stop here"):
        run.train(tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(run, "RECIPE", tiny)
    tiny.write_text(TINY.replace("lr = 1e-3", "lr = 2e-3"))
    assert trained(tmp_path / "out")
    assert "training starts anew" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/out: cannot be written .*choose another folder with --out"):
        run.train(tmp_path / "file" / "out")


def test_the_recipe_asks_every_kind_of_question_in_every_stage():
    recipe = read_recipe(run.RECIPE)
    assert all(set(data.tasks) == set(KINDS) for stage in recipe.stage for data in stage.data)
    assert [stage.kind for stage in recipe.stage] == ["pretrain"] * 4 + ["warmup", "sft"]
