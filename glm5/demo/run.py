"""Training with progress, resumption after Ctrl-C or kill, and the checkpoint it ends in.

The state file is written every SAVE_EVERY steps and on Ctrl-C, to a temporary name and renamed. What a step trains on
follows from seed and step number, so a resumed run continues exactly as an uninterrupted one.
"""

import json
import logging
import pickle
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from glm5.chat.template import ChatTemplate
from glm5.checkpoint.save import save
from glm5.common.atomic import atomic_write
from glm5.common.errors import CheckpointError
from glm5.common.progress import Progress
from glm5.common.writable import try_to_write
from glm5.config.model import ModelConfig
from glm5.config.presets import preset
from glm5.demo.recipe import Recipe
from glm5.demo.training import Packed, Trainer, initialize
from glm5.model.glm5 import Glm5
from glm5.train.data.dialogues import example, train_tokenizer
from glm5.train.data.questions import conversation

logger = logging.getLogger(__name__)

SAVE_EVERY = 50
TEMPLATE = "glm-5.2"
GENERATION = {"temperature": 0.1, "top_p": 0.95}


def train(out: Path, recipe: Recipe, seed: int, cfg: ModelConfig | None = None) -> Path:
    """Train to the end and write the checkpoint `out/model`; returns its path. Raises KeyboardInterrupt after Ctrl-C,
    when the state is on disk, and `CheckpointError` when `out` cannot be written."""
    cfg = preset("nano").replace(dtype="float32") if cfg is None else cfg
    tokenizer = train_tokenizer(cfg.vocab_size)
    template = ChatTemplate.bundled(TEMPLATE, tokenizer)
    cfg = cfg.replace(eos_token_id=list(tokenizer.eos_ids), pad_token_id=tokenizer.pad_id)
    trainer = Trainer(initialize(Glm5(cfg).float(), recipe, seed), recipe)
    run_id = f"{cfg.to_dict()} {recipe} seed {seed}"
    state_file = writable(out) / "training-state.pt"
    first = _resume(state_file, trainer, run_id)

    num_tokens, start = 0, time.monotonic()
    with Progress(recipe.num_steps - first, "step", "training") as progress, _deferred_interrupt() as interrupted:
        for step in range(first, recipe.num_steps):
            chats = [conversation(kind, "train", seed, index, size) for kind, index, size in recipe.plan(seed, step)]
            batch = Packed.of([example(template, chat) for chat in chats])
            losses = trainer.step(step, batch)
            num_tokens += len(batch.ids_T)
            rate = round(num_tokens / (time.monotonic() - start))
            progress.update(1, **losses, **{"tokens/s": rate}, stage=recipe.stage(step))
            if interrupted or (step + 1) % SAVE_EVERY == 0:
                _save_state(state_file, trainer, run_id, step + 1)
            if interrupted:
                break
    if interrupted:  # said after the bar has ended, on a line of its own
        logger.warning("stopped; the same command goes on from step %d", first + progress.num_done)
        raise KeyboardInterrupt
    path = _save_checkpoint(out, trainer.model, template)
    state_file.unlink(missing_ok=True)
    return path


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


def _resume(state_file: Path, trainer: Trainer, run_id: str) -> int:
    """The step to go on from: that of the state file if it is of this run, else 0."""
    if not state_file.exists():
        return 0
    try:
        state = torch.load(state_file, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        logger.warning("%s is damaged (%s): training starts anew", state_file, str(error).partition("\n")[0])
        return 0
    if state["run_id"] != run_id:
        logger.warning("%s is of other settings: training starts anew", state_file)
        return 0
    trainer.load_state_dict(state)
    logger.info("going on from step %d", state["step"])
    return state["step"]


def _save_state(state_file: Path, trainer: Trainer, run_id: str, step: int) -> None:
    with atomic_write(state_file, "wb") as handle:
        torch.save({"run_id": run_id, "step": step, **trainer.state_dict()}, handle)


def _save_checkpoint(out: Path, model: Glm5, template: ChatTemplate) -> Path:
    tokenizer = template.tokenizer
    assert tokenizer is not None
    with tempfile.TemporaryDirectory(dir=out) as assets:
        tokenizer.save(assets, chat_template=template.source)
        ids = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
        Path(assets, "generation_config.json").write_text(json.dumps(GENERATION | ids, indent=2), encoding="utf-8")
        return save(model, out / "model", assets=assets)


@contextmanager
def _deferred_interrupt() -> Iterator[list[int]]:
    """A list that Ctrl-C fills, so that a step is never cut in half. A second Ctrl-C acts at once."""
    received: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
