"""`glm5 train`: runs the stages of a recipe in order, and resumes an interrupted run.

The data and learning rate of a step depend only on recipe and step number; weights and optimizer state are in the state
file. So a resumed run is bitwise equal to one that was not interrupted (on a CPU with the same number of threads).
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from glm5.common.atomic import atomic_write
from glm5.common.errors import TrainingError
from glm5.common.interrupt import noted_interrupt
from glm5.config.model import ModelConfig
from glm5.config.train import Recipe, StageConfig
from glm5.kernels.current_device import current
from glm5.quant.qat import KEY
from glm5.train.build import Builder
from glm5.train.data.sources import Row
from glm5.train.lora import LoraTrainer
from glm5.train.metrics import MetricsLog, NoMetrics, flops_per_token, memory
from glm5.train.optim.build import Optimizers
from glm5.train.prefetch import RequestRow, prefetch_rows, row_workers
from glm5.train.qat import MARK, STORED, check_widths
from glm5.train.report import write_report
from glm5.train.schedule import Schedule
from glm5.train.stage_trainer import StageTrainer, device_of
from glm5.train.stages import long_sequence_warnings, losses_of
from glm5.train.state import Position, Store, clear, locked, steps_of, writing_to
from glm5.train.step import Step

logger = logging.getLogger(__name__)

FINISHING = "the step is finished and the state written first; a second one ends the run at once"
"""Message when a run is requested to stop."""
HOST_THREADS = 4
"""Torch threads of a run on a GPU, where the host only computes positions and masks. With a thread for each of 64
cores, beside processes that make sequences, a small model's step took 1.3 s; the GPU needed 0.4 s (docs/tuning.md)."""


TrainerFactory = Callable[[Recipe, Builder, Mapping[str, Any] | None], StageTrainer]


def train(recipe: Recipe, beside: Path, *, restart: bool = False) -> Path:
    """Run a recipe to its end; returns the best checkpoint of the last stage (the last one without held-out data).

    Raises KeyboardInterrupt after Ctrl-C, once the state is on disk, and errors that say which state is saved.
    """
    out = recipe.folder
    with locked(out), execution_settings(recipe):
        if restart:
            clear(out, recipe)
        return Run(recipe, beside, out, StageTrainer if recipe.lora is None else LoraTrainer).run()


@contextmanager
def execution_settings(recipe: Recipe) -> Iterator[None]:
    """Set the recipe's device and number of threads, and deterministic algorithms if it asks for them."""
    device = device_of(recipe.device)
    with (
        current(device),
        torch_threads(recipe.threads or (HOST_THREADS if device.type == "cuda" else None)),
        deterministic(enabled=recipe.deterministic),
    ):
        yield


class Run:
    """A run of a recipe: its position, state and trainer, which `make_trainer` creates."""

    def __init__(self, recipe: Recipe, beside: Path, out: Path, make_trainer: TrainerFactory) -> None:
        self.recipe, self.out = recipe, out
        self.store = Store(out, recipe)
        found = self.store.read()
        self.position, saved = (Position(), None) if found is None else found
        if self.position.done:
            return
        self.builder = Builder(recipe, beside, out)
        for stage in recipe.stage[self.position.stage :]:
            rows = self.builder.rows(stage)  # reports errors in the data of later stages before training
            for sentence in rows.warnings:
                logger.warning("stage %s: %s", stage.name, sentence)
            if stage.qat is not None:
                check_widths(self.builder.cfg)
        self.trainer = make_trainer(recipe, self.builder, saved)
        if not self.trainer.is_first:
            return
        for sentence in long_sequence_warnings(recipe, self.builder.cfg):
            logger.warning("%s", sentence)
        if saved is not None:
            self._tell_of_resumption(saved)
        with writing_to(out), atomic_write(out / "recipe.json") as handle:
            handle.write(json.dumps(json.loads(recipe.model_dump_json()), indent=2) + "\n")

    def _tell_of_resumption(self, saved: Mapping[str, Any]) -> None:
        """Also what more steps do to the learning rate, which depends on their number."""
        stage, step = self._stage, self.position.step
        logger.info("going on: stage %s, step %d of %d", stage.name, step, stage.steps)
        had = steps_of(json.loads(saved["recipe"]), self.position.stage)
        if step and had < stage.steps and stage.shape != "constant":
            before, after = (Schedule(stage.model_copy(update={"steps": steps})) for steps in (had, stage.steps))
            logger.warning(
                "stage %s has %d steps instead of %d: from step %d on, the learning rate is that of %d steps; "
                "it goes from %.3g to %.3g",
                *(stage.name, stage.steps, had, step + 1, stage.steps, before.lr(step - 1), after.lr(step)),
            )

    @property
    def _stage(self) -> StageConfig:
        return self.recipe.stage[self.position.stage]

    def run(self) -> Path:
        if not self.position.done:
            optimizers: Optimizers | None = None
            with row_workers(self.builder) as request_row:
                while True:
                    optimizers = self._run_stage(optimizers, request_row)
                    if self.position.stage + 1 == len(self.recipe.stage):
                        break
                    self.position.stage, self.position.step = self.position.stage + 1, 0
            self.trainer.finish()
        folder = self.store.stage_folder(self._stage.name)
        best = folder / "best"
        return best if best.exists() else folder / "last"

    def _run_stage(self, before: Optimizers | None, request_row: RequestRow) -> Optimizers:
        step = self.trainer.begin(self._stage, self._config(), before)
        _Stage(self, self._stage, step).run(request_row)
        return step.optimizers

    def _config(self) -> ModelConfig:
        """The model's config in this stage, with the changes of earlier stages."""
        so_far = self.recipe.stage[: self.position.stage + 1]
        cfg = self.builder.cfg
        longest = max(cfg.max_position_embeddings, *(stage.seq_len for stage in so_far))
        theta = next((stage.rope_theta for stage in reversed(so_far) if stage.rope_theta is not None), cfg.rope_theta)
        aware = {KEY: MARK} if self._stage.qat is not None else {}
        return cfg.replace(rope_theta=theta, max_position_embeddings=longest, **aware)


class _Stage:
    """The steps of one stage."""

    def __init__(self, run: Run, stage: StageConfig, step: Step) -> None:
        self.parent, self.trainer, self.stage, self.step = run, run.trainer, stage, step
        self.recipe, self.position = run.recipe, run.position
        self.schedule = Schedule(stage)
        self.rows = run.builder.rows(stage)
        self.flops = flops_per_token(step.model.cfg, stage.seq_len, step.phase)

    def run(self, request_row: RequestRow) -> None:
        first = self.position.step
        plan = self.recipe.checkpoints
        steps, stop = range(first, self.stage.steps), False
        if steps:
            draws = range(self._draws(first).start, self._draws(self.stage.steps - 1).stop)
            held_out = self._held_out_rows if self.rows.holds_out else []
            rows = chain(held_out, map(self.rows.row, draws))
            self.trainer.prepare(self.stage, rows, len(held_out) + len(draws), is_start=not first)
        says = FINISHING if self.trainer.is_first else ""
        with self._open_metrics() as log, noted_interrupt(says, log.release) as interrupted:
            for number, rows in prefetch_rows(request_row, self.position.stage, self._draws, steps):
                self._train_on(number, rows, log)
                last = self.position.step == self.stage.steps
                at_checkpoint = last or self.position.step % plan.every == 0
                if at_checkpoint or self.position.step % (plan.evaluate_every or plan.every) == 0:
                    metrics = self._held_out(log)
                    if at_checkpoint:
                        log.release()
                        self._save_checkpoint(metrics)
                stop = self.trainer.agree(stop=bool(interrupted))
                if stop:
                    break
            if stop:
                self.trainer.write_state(self.parent.store, self.position)
                self.trainer.finish()
        if stop:
            logger.warning("stopped at step %d of %s; the same command goes on", self.position.step, self.stage.name)
            raise KeyboardInterrupt

    def _open_metrics(self) -> MetricsLog | NoMetrics:
        if not self.trainer.is_first:
            return NoMetrics()
        return MetricsLog(self.parent.out, self.recipe, self.stage, self.position.step)

    def _draws(self, step: int) -> range:
        return self.trainer.share(self.schedule.draws(step))

    def _train_on(self, number: int, rows: Sequence[Row], log: MetricsLog | NoMetrics) -> None:
        began = time.monotonic()
        self.step.cfg = losses_of(self.recipe, self.stage, number)
        lr = self.schedule.lr(number)
        try:
            metrics = self.step.run(self.trainer.batches(self.stage, rows), lr)
        except TrainingError as error:
            self._skip_step(number, error)
            metrics = {}
        tokens = self.trainer.tokens(sum(len(row.ids) for row in rows))
        seconds = time.monotonic() - began
        self.position.step = number + 1
        self.position.tokens += tokens
        self.position.seconds += seconds
        metrics |= {"lr": lr, "tokens": self.position.tokens, "seconds": seconds, "tokens/s": tokens / seconds}
        metrics["optimizer seconds"] = self.step.optimizer_seconds
        if self.recipe.peak_tflops is not None:
            metrics["mfu"] = self.flops * tokens / seconds / self.recipe.peak_tflops / 1e12
        log.step(number + 1, metrics | {"GiB": memory(self.trainer.device)})

    def _skip_step(self, number: int, error: TrainingError) -> None:
        """Count a step without an update; if there are too many, save the state and raise TrainingError."""
        draws = self.schedule.draws(number)
        data = ", ".join(self.rows.where(draw) for draw in draws[:4])
        where = f"stage {self.stage.name}, step {number + 1}, on {data}{' and more' if len(draws) > 4 else ''}"
        self.position.skipped += 1
        if self.position.skipped <= self.recipe.skip_steps:
            self.step.balance.update(0.0)  # resets the loads of the skipped step
            logger.warning("%s: %s; left out", where, error)
            return
        self.position.skipped -= 1
        self.trainer.write_state(self.parent.store, self.position)
        self.trainer.finish()
        raise TrainingError(
            f"{where}: {error}. The state before it is saved in {self.parent.out}; "
            f"--set skip_steps={self.position.skipped + 1} leaves this step out"
        ) from error

    def _held_out(self, log: MetricsLog | NoMetrics) -> dict[str, float]:
        """Metrics of the held-out rows; empty if no source holds rows out."""
        if not self.rows.holds_out:
            return {}
        metrics = self.trainer.held_out(self.stage, self._held_out_rows, self.step.phase)
        log.held_out(self.position.step, metrics)
        return metrics

    @cached_property
    def _held_out_rows(self) -> list[Row]:
        rows = [self.rows.row(draw, "held out") for draw in range(self.recipe.checkpoints.held_out)]
        # Pairs are counted, and a temperature is fitted on them: each once, also where there are fewer rows.
        return list({row.ids.tobytes(): row for row in rows}.values()) if self.stage.learns_pairs else rows

    def _save_checkpoint(self, metrics: dict[str, float]) -> None:
        """Write a checkpoint, update the links `last` and `best`, write the state, and delete older checkpoints."""
        store, name, number = self.parent.store, self.stage.name, self.position.step
        folder = store.checkpoint(name, number)
        dtype = self.recipe.checkpoints.dtype if self.stage.qat is None else STORED
        with writing_to(folder):
            self.trainer.export(folder, dtype, self.parent.builder.assets)
            best = self.position.best.get(name)
            loss = metrics.get("held-out loss")
            if loss is not None and (best is None or loss < best[0]):
                self.position.best[name] = [loss, number]
            is_best = self.position.best.get(name) != best
            if self.trainer.is_first:
                store.point(name, "last", number)
                if is_best:
                    store.point(name, "best", number)
        self._note_end()
        self.trainer.write_state(store, self.position)
        if self.trainer.is_first:
            store.prune(name, self.recipe.checkpoints.keep)

    def _note_end(self) -> None:
        """At the end of the run: the report, and the mark in the position."""
        is_last = self.stage is self.recipe.stage[-1]
        self.position.done = is_last and self.position.step == self.stage.steps
        if self.position.done and self.trainer.is_first:
            with writing_to(self.parent.out / "report.html"):
                write_report(self.parent.out, self.recipe)


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Torch computes with that number of threads inside the block; None: as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(*, enabled: bool) -> Iterator[None]:
    """Deterministic algorithms inside the block, if `enabled`; the previous settings are restored."""
    filling: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    if enabled:
        torch.use_deterministic_algorithms(mode=True)
        filling.fill_uninitialized_memory = False  # a debugging aid that costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before)
        filling.fill_uninitialized_memory = filled
