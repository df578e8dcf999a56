"""`glm5 train`: the stages of a recipe one after the other, each from where it was cut off.

What a step trains on, and its learning rate, follow from recipe and step number; weights and optimizer are in the
state file. So a run that was killed goes on to the same bits as one that was not (on a CPU with as many threads).
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm5.checkpoint.save import save
from glm5.common.atomic import atomic_write
from glm5.common.errors import TrainingError
from glm5.common.interrupt import noted_interrupt
from glm5.config.model import ModelConfig
from glm5.config.train import Recipe, StageConfig
from glm5.quant.qat import KEY
from glm5.train.ahead import Ask, ahead, rows_of
from glm5.train.batch import Batch
from glm5.train.build import Builder
from glm5.train.data.sources import Row
from glm5.train.evaluate import held_out
from glm5.train.masters import Masters
from glm5.train.optim.build import Optimizers
from glm5.train.qat import MARK, STORED, make_aware
from glm5.train.recall import attention_recall
from glm5.train.report import write_report
from glm5.train.schedule import Schedule
from glm5.train.stages import choose_parameters, losses_of, phase_of
from glm5.train.state import Position, Store, clear, locked, writing_to
from glm5.train.step import Step
from glm5.train.watch import Watch, flops_per_token, memory

logger = logging.getLogger(__name__)


def train(recipe: Recipe, beside: Path, *, restart: bool = False) -> Path:
    """Run a recipe to its end; returns the best checkpoint of the last stage (the last one where nothing is held out).

    Raises KeyboardInterrupt after Ctrl-C, when the state is on disk, and errors that say what is kept.
    """
    out = recipe.folder
    with locked(out), _threads(recipe.threads), _one_order(recipe):
        if restart:
            clear(out, recipe)
        return _Run(recipe, beside, out).to_the_end()


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError(f"device {name}: there is no CUDA device here")
    return device


class _Run:
    """A model on its way through the stages."""

    def __init__(self, recipe: Recipe, beside: Path, out: Path) -> None:
        self.recipe, self.out = recipe, out
        self.store = Store(out, recipe)
        self.device = device_of(recipe.device)
        found = self.store.read()
        self.position, self._saved = (Position(), None) if found is None else found
        if self.position.done:
            return
        self.builder = Builder(recipe, beside, out)
        for stage in recipe.stage[self.position.stage :]:
            self.builder.rows(stage)  # whatever is wrong with the data of a later stage is said now
        self.model = self.builder.model(self.device)
        compute = getattr(torch, recipe.model.compute or recipe.model.dtype)
        self.masters = None if compute == self.model.dtype else Masters(self.model, compute)
        if self._saved is not None:
            if self.masters is None:
                self.model.load_state_dict(self._saved["model"])
            else:
                self.masters.load_state_dict(self.model, self._saved["model"])
            logger.info("going on: stage %s, step %d", self._stage.name, self.position.step)
        with writing_to(out), atomic_write(out / "recipe.json") as handle:
            handle.write(json.dumps(json.loads(recipe.model_dump_json()), indent=2) + "\n")

    @property
    def _stage(self) -> StageConfig:
        return self.recipe.stage[self.position.stage]

    def to_the_end(self) -> Path:
        if not self.position.done:
            optimizers: Optimizers | None = None
            with rows_of(self.builder) as ask:
                while True:
                    optimizers = self._run_stage(optimizers, ask)
                    if self.position.stage + 1 == len(self.recipe.stage):
                        break
                    self.position.stage, self.position.step = self.position.stage + 1, 0
            self.position.done = True
            with writing_to(self.out / "report.html"):
                write_report(self.out, self.recipe)
            self.store.write(self.position, {}, {})
        folder = self.store.stage_folder(self._stage.name)
        best = folder / "best"
        return best if best.exists() else folder / "last"

    def _run_stage(self, before: Optimizers | None, ask: Ask) -> Optimizers:
        recipe, stage = self.recipe, self._stage
        choose_parameters(self.model, stage)
        make_aware(self.model, aware=stage.qat is not None)
        self.model.cfg = self._config()
        named = dict(self.model.named_parameters()) if self.masters is None else self.masters.trained()
        optimizers = Optimizers(named, self.model.cfg, stage.optimizer or recipe.optimizer)
        if self._saved is not None:
            optimizers.load_state_dict(self._saved["optimizer"])
            self._saved = None
        elif stage.keep_optimizer and before is not None:
            optimizers.load_state_dict(before.state_dict())
        step = Step(self.model, optimizers, losses_of(recipe, stage, 0), phase_of(stage), self.masters)
        _Stage(self, stage, step).run(ask)
        return optimizers

    def _config(self) -> ModelConfig:
        """The model's config in this stage: what earlier stages changed stays changed."""
        so_far = self.recipe.stage[: self.position.stage + 1]
        cfg = self.builder.cfg
        longest = max(cfg.max_position_embeddings, *(stage.seq_len for stage in so_far))
        theta = next((stage.rope_theta for stage in reversed(so_far) if stage.rope_theta is not None), cfg.rope_theta)
        aware = {KEY: MARK} if self._stage.qat is not None else {}
        return cfg.replace(rope_theta=theta, max_position_embeddings=longest, **aware)


class _Stage:
    """The steps of one stage."""

    def __init__(self, run: _Run, stage: StageConfig, step: Step) -> None:
        self.run_, self.stage, self.step = run, stage, step
        self.recipe, self.position = run.recipe, run.position
        self.schedule = Schedule(stage)
        self.rows = run.builder.rows(stage)
        self.flops = flops_per_token(run.model.cfg, stage.seq_len, step.phase)

    def run(self, ask: Ask) -> None:
        first = self.position.step
        plan = self.recipe.checkpoints
        with Watch(self.run_.out, self.stage, first) as watch, noted_interrupt() as interrupted:
            for number, rows in ahead(ask, self.position.stage, self.schedule, range(first, self.stage.steps)):
                self._train_on(number, rows, watch)
                last = self.position.step == self.stage.steps
                at_checkpoint = last or self.position.step % plan.every == 0
                if at_checkpoint or self.position.step % (plan.evaluate_every or plan.every) == 0:
                    figures = self._held_out(watch)
                    if at_checkpoint:
                        self._save_checkpoint(figures)
                if interrupted:
                    break
            if interrupted:
                self._save_state()
        if interrupted:
            logger.warning("stopped at step %d of %s; the same command goes on", self.position.step, self.stage.name)
            raise KeyboardInterrupt

    def _train_on(self, number: int, rows: Sequence[Row], watch: Watch) -> None:
        began = time.monotonic()
        self.step.cfg = losses_of(self.recipe, self.stage, number)
        lr = self.schedule.lr(number)
        try:
            figures = self.step.run(self._batches(rows), lr)
        except TrainingError as error:
            self._left_out(number, error)
            figures = {}
        tokens = sum(len(row.ids) for row in rows)
        seconds = time.monotonic() - began
        self.position.step = number + 1
        self.position.tokens += tokens
        self.position.seconds += seconds
        figures |= {"lr": lr, "tokens": self.position.tokens, "seconds": seconds, "tokens/s": tokens / seconds}
        if self.recipe.peak_tflops is not None:
            figures["mfu"] = self.flops * tokens / seconds / self.recipe.peak_tflops / 1e12
        watch.step(number + 1, figures | {"GiB": memory(self.run_.device)})

    def _left_out(self, number: int, error: TrainingError) -> None:
        """Count a step that changed nothing; at one too many the run ends, its state on disk."""
        draws = self.schedule.draws(number)
        data = ", ".join(self.rows.where(draw) for draw in draws[:4])
        where = f"stage {self.stage.name}, step {number + 1}, on {data}{' and more' if len(draws) > 4 else ''}"
        self.position.skipped += 1
        if self.position.skipped <= self.recipe.skip_steps:
            self.step.balance.update(0.0)  # what was counted in it does not count
            logger.warning("%s: %s; left out", where, error)
            return
        self.position.skipped -= 1
        self._save_state()
        raise TrainingError(
            f"{where}: {error}. The state before it is saved in {self.run_.out}; "
            f"--set skip_steps={self.position.skipped + 1} leaves this step out"
        ) from error

    def _batches(self, rows: Sequence[Row]) -> list[Batch]:
        size = self.stage.pass_sequences or self.stage.sequences
        return [batch_of(rows[at : at + size], self.run_.device) for at in range(0, len(rows), size)]

    def _held_out(self, watch: Watch) -> dict[str, float]:
        """Figures of the held-out rows; nothing where a source holds none back."""
        if not self.rows.holds_out:
            return {}
        batches = self._batches(self._held_out_rows)
        figures = held_out(self.run_.model, batches, self.step.phase)
        if self.step.phase.learn_index:
            recall = attention_recall(self.run_.model, batches)
            figures |= {} if recall is None else {"attention recall": recall}
        watch.held_out(self.position.step, figures)
        return figures

    @cached_property
    def _held_out_rows(self) -> list[Row]:
        return [self.rows.row(draw, "held out") for draw in range(self.recipe.checkpoints.held_out)]

    def _save_checkpoint(self, figures: dict[str, float]) -> None:
        """Checkpoint, what points to it, and the state behind it; older checkpoints go."""
        store, name, number = self.run_.store, self.stage.name, self.position.step
        folder = store.checkpoint(name, number)
        dtype = self.recipe.checkpoints.dtype if self.stage.qat is None else STORED
        with writing_to(folder):
            save(self.run_.model, folder, dtype=dtype, assets=self.run_.builder.assets)
            store.point(name, "last", number)
            best = self.position.best.get(name)
            loss = figures.get("held-out loss")
            if loss is not None and (best is None or loss < best[0]):
                self.position.best[name] = [loss, number]
                store.point(name, "best", number)
        self._save_state()
        store.prune(name, self.recipe.checkpoints.keep)

    def _save_state(self) -> None:
        model, masters = self.run_.model, self.run_.masters
        weights = model.state_dict() if masters is None else masters.state_dict(model)
        self.run_.store.write(self.position, weights, self.step.optimizers.state_dict())


def batch_of(rows: Sequence[Row], device: torch.device) -> Batch:
    """Rows as one pass."""
    ids_T = torch.from_numpy(np.concatenate([row.ids for row in rows]))
    weight_T = torch.from_numpy(np.concatenate([row.weights for row in rows]))
    return Batch(ids_T, weight_T, [length for row in rows for length in row.lengths]).to(device)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _one_order(recipe: Recipe) -> Iterator[None]:
    """`deterministic`, which other code of this process need not want."""
    filling: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    if recipe.deterministic:
        torch.use_deterministic_algorithms(mode=True)
        filling.fill_uninitialized_memory = False  # finds mistakes, at a price
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before)
        filling.fill_uninitialized_memory = filled
