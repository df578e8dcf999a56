"""The demo's model: `glm5 train`'s loop runs recipe.toml, and the last checkpoint becomes the demo's model.

`glm5 train` also resumes: after Ctrl-C at the step, after a kill at the last saved state.
"""

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from glm5.chat.template import ChatTemplate
from glm5.common.errors import CheckpointError
from glm5.common.writable import try_to_write
from glm5.config.train import Recipe, read_recipe
from glm5.train.data.dialogues import train_tokenizer
from glm5.train.loop import train as train_recipe

logger = logging.getLogger(__name__)

RECIPE = Path(__file__).with_name("recipe.toml")
TEMPLATE = "glm-5.2"
GENERATION = {"temperature": 0.1, "top_p": 0.95}


def train(out: Path) -> Path:
    """Train to the end and write the checkpoint `out/model`; returns its path. Raises KeyboardInterrupt after Ctrl-C,
    when the state is on disk, and `CheckpointError` when `out` cannot be written."""
    tokenizer, training = writable(out) / "tokenizer", out / "training"
    places = [f"out={json.dumps(str(training))}", f"model.tokenizer={json.dumps(str(tokenizer))}"]
    recipe = read_recipe(RECIPE, places)
    is_other = _is_of_another_recipe(training, recipe)
    if is_other:
        logger.warning("%s is of another recipe: training starts anew", training)
    if not tokenizer.exists():
        _write_tokenizer(tokenizer, recipe)
    train_recipe(recipe, RECIPE.parent, restart=is_other)
    # Not the best: the recipe holds out one row, which says little.
    os.replace((training / recipe.stage[-1].name / "last").resolve(), out / "model")
    shutil.rmtree(training)
    shutil.rmtree(tokenizer)
    return out / "model"


def writable(out: Path) -> Path:
    """`out`, made if need be. Raises CheckpointError where nothing can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        try_to_write(out)
    except OSError as error:
        raise CheckpointError(
            f"{out}: cannot be written ({error.strerror}); choose another folder with --out"
        ) from None
    return out


def _is_of_another_recipe(training: Path, recipe: Recipe) -> bool:
    """Whether a run was left there by a version with another recipe."""
    try:
        return json.loads((training / "recipe.json").read_bytes()) != json.loads(recipe.model_dump_json())
    except FileNotFoundError:
        return False


def _write_tokenizer(folder: Path, recipe: Recipe) -> None:
    """The files that every checkpoint gets: tokenizer, chat template, sampling defaults."""
    tokenizer = train_tokenizer(recipe.model.architecture().vocab_size)
    with tempfile.TemporaryDirectory(dir=folder.parent) as building:
        files = Path(building) / folder.name
        tokenizer.save(files, chat_template=ChatTemplate.bundled(TEMPLATE).source)
        ids = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
        (files / "generation_config.json").write_text(json.dumps(GENERATION | ids, indent=2), encoding="utf-8")
        os.replace(files, folder)
