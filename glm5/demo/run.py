"""Training as recipe.toml says (glm5/train resumes it after Ctrl-C and kill), and the checkpoint it ends in."""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from glm5.chat.template import ChatTemplate
from glm5.common.errors import CheckpointError, TrainingError
from glm5.common.writable import try_to_write
from glm5.config.train import Recipe, read_recipe
from glm5.train import loop
from glm5.train.build import TEMPLATE
from glm5.train.data.dialogues import train_tokenizer
from glm5.train.state import Store

logger = logging.getLogger(__name__)

RECIPE = Path(__file__).with_name("recipe.toml")
GENERATION = {"temperature": 0.1, "top_p": 0.95}


def train(out: Path, settings: Sequence[str] = ()) -> Path:
    """Train to the end and write the checkpoint `out/model`; returns its path. `settings`: KEY=VALUE of the recipe.

    Raises KeyboardInterrupt after Ctrl-C, when the state is on disk, and `CheckpointError` when `out` cannot be
    written.
    """
    folder, tokenizer = writable(out) / "training", out / "tokenizer"
    places = [f"out={json.dumps(str(folder))}", f"model.tokenizer={json.dumps(str(tokenizer))}"]
    recipe = read_recipe(RECIPE, [*places, *settings])
    _write_tokenizer(tokenizer, recipe)
    trained = loop.train(recipe, RECIPE.parent, restart=not _can_resume(recipe))
    os.replace(trained.resolve(), out / "model")
    for path in (folder, tokenizer):
        shutil.rmtree(path)
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


def _write_tokenizer(folder: Path, recipe: Recipe) -> None:
    """The tokenizer's files, and the settings of generation that go into every checkpoint beside them."""
    tokenizer = train_tokenizer(recipe.model.architecture().vocab_size)
    tokenizer.save(folder, chat_template=ChatTemplate.bundled(TEMPLATE, tokenizer).source)
    ids = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | ids, indent=2), encoding="utf-8")


def _can_resume(recipe: Recipe) -> bool:
    try:
        Store(recipe.folder, recipe).read()
    except TrainingError as error:
        logger.warning("%s; training starts anew", error)
        return False
    return True
