"""Training resumes exactly, after Ctrl-C and after kill -9; its optimizer orthogonalises heads apart."""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from glm5.common.errors import CheckpointError
from glm5.config.presets import preset
from glm5.demo import run
from glm5.demo.muon import Muon, orthogonalize
from glm5.demo.recipe import Mixture, Recipe
from glm5.demo.run import train
from glm5.demo.training import Trainer

RECIPE = replace(
    Recipe(), num_steps=6, mixtures=(Mixture({"copy": 1, "tool": 1}, 1.0),), warmup_from=0.3, sparse_from=0.5
)
SINGULAR = (0.6, 1.3)  # what five steps leave of singular values between 0.01 and 1
# Runs the same training as `trained`, says when a state is on disk, and waits there to be killed.
CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.unit.demo import test_training as t
save = t.run._save_state
def saved(*args):
    save(*args)
    print("saved", flush=True)
    sys.stdin.read()
t.run._save_state, t.run.SAVE_EVERY = saved, 3
t.trained(Path(sys.argv[1]))
"""


def trained(out):
    cfg = preset("tiny").replace(vocab_size=768, dtype="float32")
    return (train(out, RECIPE, seed=0, cfg=cfg) / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("straight") / "out")


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, straight, monkeypatch):
    step = Trainer.step

    def interrupted(self, number, batch):
        if number == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, number, batch)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path)
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(Trainer, "step", step)
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
    state = tmp_path / "training-state.pt"
    if isinstance(content, bytes):
        state.write_bytes(content)
    else:
        torch.save({"run_id": content, "step": 3}, state)
    assert trained(tmp_path) == straight
    assert "training starts anew" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/out: cannot be written .*choose another folder with --out"):
        trained(tmp_path / "file" / "out")


def test_orthogonalize(seed):
    gen = torch.Generator().manual_seed(seed)
    for shape in [(8, 8), (4, 16), (16, 4), (3, 6, 10)]:
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=gen)))
        assert values.min() > SINGULAR[0]
        assert values.max() < SINGULAR[1]


def test_heads_are_updated_alike_whatever_their_gradients(seed):
    """Two heads, one with gradients 100 times smaller: split, both move as far; whole, the small one starves."""
    grad = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    grad[32:] /= 100

    def moved(heads):
        weight = torch.nn.Parameter(torch.zeros(64, 8))
        weight.grad = grad.clone()
        Muon([weight], {weight: heads}, lr=1.0, weight_decay=0.0).step()
        return (weight[32:].norm() / weight[:32].norm()).item()

    assert moved(2) == pytest.approx(1.0, abs=0.1)
    assert moved(1) < 0.1


def test_stages_train_what_they_say(tmp_path):
    cfg = preset("tiny").replace(vocab_size=768, dtype="float32")
    trainer = Trainer(run.initialize(run.Glm5(cfg), RECIPE, 0), RECIPE)
    template = run.ChatTemplate.bundled(run.TEMPLATE, run.train_tokenizer(768))
    batch = run.Packed.of([run.example(template, run.conversation("tool", "train", 0, 0))])
    names = [set(trainer.step(step, batch)) for step in range(RECIPE.num_steps)]
    assert names[0] == {"loss"}
    assert names[2] == {"loss", "index", "mtp", "mtp index"}
    assert names[4:] == [{"loss", "index"}, {"loss", "mtp"}]
