"""The saved state of a run: one file, replaced atomically, and folders of checkpoints.

    OUT/state.pt              weights, optimizer state, and position of the run
    OUT/state-*.pt            in distributed runs: each rank's rows of weights and optimizer state (sharded_state.py)
    OUT/STAGE/step-00000500   checkpoints in the published layout; OUT/STAGE/last and best link to two of them
    OUT/run.lock              locked while a process trains there

If a run is killed, state.pt is the complete state of some step, and the steps after it are repeated identically.
"""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5.common.atomic import atomic_write, sweep
from glm5.common.errors import CheckpointError, TrainingError
from glm5.config.train import Recipe
from glm5.train.sharded_state import DAMAGED, check_bytes, damaged

logger = logging.getLogger(__name__)

VERSION = 1
CHANGEABLE_KEYS = {
    *("out", "device", "checkpoints", "peak_tflops", "skip_steps", "workers", "parallel"),
    *("tensorboard", "wandb"),
}
"""Keys of a recipe that may change when a run is resumed."""
_OF_STAGE = re.compile(r"step-\d{8,}(-int4)?|\.step-\d{8,}-int4\.quantizing")
"""Folders of a stage: checkpoints, int4 checkpoints, and incomplete int4 checkpoints."""


@dataclass
class Position:
    """The position of a run: the stage, its finished steps, and totals of the run."""

    stage: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    best: dict[str, list[float]] = field(default_factory=dict)
    """For each stage [held-out loss, step] of its best checkpoint."""
    done: bool = False


class Store:
    """The state file of a run and its checkpoints."""

    def __init__(self, out: Path, recipe: Recipe) -> None:
        self.out, self.file = out, out / "state.pt"
        self._recipe = json.loads(recipe.model_dump_json(exclude=CHANGEABLE_KEYS))

    def read(self) -> tuple[Position, Mapping[str, Any]] | None:
        """The state, or None for a new run. A run goes on if its stage has more steps now than before, also after its
        end. Raises `TrainingError` when the state is damaged or of another recipe."""
        if not self.file.exists():
            return None
        try:
            check_bytes(self.file)
            state = torch.load(self.file, weights_only=True, map_location="cpu", mmap=True)
            position, recipe = Position(**state["position"]), json.loads(state["recipe"])
            threads: int = state["threads"]
            if not 0 <= position.stage < max(1, len(recipe["stage"])):
                raise ValueError(f"it is in stage {position.stage}, and there are {len(recipe['stage'])}")
        except DAMAGED as error:
            raise damaged(self.file, error) from None
        had, has = (steps_of(one, position.stage) for one in (recipe, self._recipe))
        if has > had:
            recipe["stage"][position.stage]["steps"] = has
            position.done = False
        if difference := first_difference(_fixed(recipe), self._recipe):
            raise TrainingError(
                f"{self.out} holds a run of another recipe: {difference}; go on with the old one, choose another out "
                "(model.checkpoint = a checkpoint of this run starts from it), or throw it away with --restart"
            )
        if threads != torch.get_num_threads() and not position.done:
            logger.warning(
                "the run began with %d torch threads and goes on with %d: sums may round otherwise",
                threads,
                torch.get_num_threads(),
            )
        if position.step and not (position.done or state["model"] or state["parts"]):
            raise TrainingError(
                f"{self.out}: an earlier version ended this run without keeping what more steps need; begin another "
                "with model.checkpoint = the last checkpoint of this one"
            )
        return position, state

    def write(
        self,
        position: Position,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        *,
        parts: Sequence[str] = (),
    ) -> None:
        """Replace the state. Raises `TrainingError` when it cannot be written; the previous state is then unchanged.

        `parts`: files that hold weights and optimizer state instead of `model` and `optimizer`; their writer deletes
        older ones.
        """
        state = {
            "version": VERSION,
            "recipe": json.dumps(self._recipe),
            "threads": torch.get_num_threads(),
            "position": asdict(position),
            "model": model,
            "optimizer": optimizer,
            "parts": list(parts),
        }
        with writing_to(self.file), atomic_write(self.file, "wb") as handle:
            torch.save(state, handle)
        if not parts:
            _drop_parts(self.out)

    def stage_folder(self, stage: str) -> Path:
        return self.out / stage

    def checkpoint(self, stage: str, step: int) -> Path:
        return self.out / stage / f"step-{step:08d}"

    def point(self, stage: str, name: str, step: int) -> None:
        """Link OUT/STAGE/NAME to a checkpoint, atomically."""
        link = self.out / stage / name
        building = link.with_name(f".{name}.new")
        building.unlink(missing_ok=True)
        building.symlink_to(self.checkpoint(stage, step).name)
        os.replace(building, link)

    def prune(self, stage: str, keep: int) -> None:
        """Delete all checkpoints of a stage but the last `keep` and those that are linked."""
        folder = self.out / stage
        saved = sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name))
        pointed = {os.readlink(folder / name) for name in ("last", "best") if (folder / name).is_symlink()}
        for path in saved[:-keep]:
            if path.name not in pointed:
                shutil.rmtree(path)


@contextmanager
def writing_to(path: Path) -> Generator[None, None, None]:
    """Turn write errors inside the block into `TrainingError`s that say which state is kept."""
    try:
        yield
    except CheckpointError as error:
        raise TrainingError(f"{error}; the run goes on from the state before with the same command") from error
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error).partition("\n")[0]
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise TrainingError(
            f"{path}: writing failed: {reason}; what was there before is unchanged"
            f"{': make room, and' if full else '; once that is mended,'} the same command goes on from there"
        ) from error


@contextmanager
def locked(out: Path, key: str = "out") -> Generator[None, None, None]:
    """Lock a folder that a command writes, which `key` sets. Raises `TrainingError` when another one holds it, or it is
    not writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = (out / "run.lock").open("w")
    except OSError as error:
        raise TrainingError(f"{out}: cannot be written ({error.strerror}); choose another folder with {key}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainingError(
                f"{out}: another process of glm5 is writing there; wait for it, or choose another {key}"
            ) from None
        for folder in (out, *(path for path in out.iterdir() if path.is_dir())):
            sweep(folder)
        yield


def clear(out: Path, recipe: Recipe) -> None:
    """Delete the files of a run of this recipe in `out`; other files are kept."""
    _drop_parts(out)
    for name in ("state.pt", "metrics.jsonl", "recipe.json", "report.html"):
        (out / name).unlink(missing_ok=True)
    for name in ("data", "tokenizer"):
        shutil.rmtree(out / name, ignore_errors=True)
    for stage in recipe.stage:
        folder = out / stage.name
        if folder.is_dir():
            for path in folder.iterdir():
                if path.is_symlink():
                    path.unlink()
                elif _OF_STAGE.fullmatch(path.name):
                    shutil.rmtree(path)


def _drop_parts(out: Path) -> None:
    for file in out.glob("state-*.pt"):
        file.unlink(missing_ok=True)


def steps_of(recipe: Mapping[str, Any], stage: int) -> int:
    """Steps of a stage in a recipe as JSON; 0 where there is no such stage."""
    return recipe["stage"][stage]["steps"] if stage < len(recipe["stage"]) else 0


def _fixed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that may change, of which older versions compared some."""
    return {key: value for key, value in recipe.items() if key not in CHANGEABLE_KEYS}


def first_difference(old: Any, new: Any, path: str = "") -> str:
    """The first difference of two recipes, with both values; empty if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(new.keys() - old.keys())]:
            if found := first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key):
                return found
        return ""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return next((found for i, (a, b) in pairs if (found := first_difference(a, b, f"{path}.{i}"))), "")
    return "" if old == new else f"{path} was {old!r:.60} and is {new!r:.60}"
