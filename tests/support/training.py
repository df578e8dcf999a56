"""Small runs that tests of the loop share."""

from pathlib import Path

import torch

from glm5.config.train import Recipe, read_recipe
from glm5.train.loop import train
from glm5.train.state import Store

RECIPE = """
name = "small"
threads = 1
[model]
preset = "tiny"
unit_scale = true
embedding_std = 0.7
config = {num_hidden_layers = 2, index_topk_pattern = "FF"}
[losses]
mtp_depth = 1
[checkpoints]
every = 3
held_out = 2
"""
STAGE = """
[[stage]]
name = "NAME"
kind = "KIND"
steps = STEPS
seq_len = 64
sequences = 2
lr = 3e-3
data = [{kind = "needle"}]
"""


def stage(name="dense", kind="pretrain", steps=6, **values) -> str:
    more = "".join(f"{key} = {value}\n" for key, value in values.items())
    return STAGE.replace("NAME", name).replace("KIND", kind).replace("STEPS", str(steps)) + more


def recipe_file(folder: Path, *stages: str) -> Path:
    file = folder / "recipe.toml"
    file.write_text(RECIPE + "".join(stages or (stage(),)))
    return file


def recipe(folder: Path, out: str, *stages: str, settings=()) -> Recipe:
    return read_recipe(recipe_file(folder, *stages), [f"out={folder / out}", *settings])


def run(folder: Path, out: str, *stages: str, settings=()) -> Path:
    return train(recipe(folder, out, *stages, settings=settings), folder)


def weights(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of a checkpoint's weights, file by file."""
    return {file.name: file.read_bytes() for file in sorted(checkpoint.glob("*.safetensors"))}


def state(folder: Path, of: Recipe):
    found = Store(folder, of).read()
    assert found is not None
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are equal in both."""
    return [name for name in a if torch.equal(a[name], b[name])]
