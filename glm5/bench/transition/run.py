"""Runs and measures all trainings of a transition, several at a time."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from glm5.bench.transition.trainings import Transition
from glm5.checkpoint.load import load
from glm5.common.progress import Progress
from glm5.config.step import WindowConfig
from glm5.config.train import Recipe, read_recipe
from glm5.config.transition import TransitionConfig
from glm5.model.glm5 import Glm5
from glm5.train.attention_recall import attention_recall
from glm5.train.batch import Batch
from glm5.train.build import Builder
from glm5.train.evaluate import held_out
from glm5.train.loop import train
from glm5.train.sliding_window import search_pattern
from glm5.train.stage_trainer import batch_of, device_of
from glm5.train.step import Phase

DENSE, DENSE_MORE = "dense", "dense, trained on"
DSA_NEW, DSA_WARM, DSA = "DSA, indexers random", "DSA after warm-up", "DSA after joint steps"
WINDOWS = {"S": "SWA, all layers", "SF": "SWA Interleave"}
PATTERN = "SWA Pattern"
SEARCHED = 16  # sequences by which a pattern is chosen


@dataclass(frozen=True)
class Row:
    """One kind of attention on held-out rows: accuracy, cross-entropy, and the share of keys that the last token reads.
    `recall`: the share of dense attention's probability on the selected keys."""

    name: str
    seed: int
    accuracy: float
    loss: float
    keys: float
    recall: float | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class Done:
    """A finished training: its rows and its time."""

    part: str
    seed: int
    rows: list[Row]
    seconds: float
    cpu_seconds: float


class Measure:
    """Measures one seed's checkpoints, all on the same held-out sequences of the sparse stage."""

    def __init__(self, transition: Transition, beside: Path, num_sequences: int) -> None:
        self.seed, self.stage = transition.seed, transition.sparse
        rows = Builder(transition.dense(), beside, transition.dense().folder).rows(self.stage)
        size, device = self.stage.pass_sequences or self.stage.sequences, device_of(transition.recipe.device)

        def batches(draws: range) -> list[Batch]:
            drawn = [rows.row(draw, "held out") for draw in draws]
            return [batch_of(drawn[at : at + size], device) for at in range(0, len(drawn), size)]

        self.batches = batches(range(num_sequences))
        self._searched = batches(range(num_sequences, num_sequences + SEARCHED))

    def row(self, name: str, model: Glm5, phase: Phase, *, recall: bool = False) -> Row:
        metrics = held_out(model, self.batches, phase)
        accuracy, loss = metrics["held-out accuracy"], metrics["held-out loss"]
        kept = attention_recall(model, self.batches) if recall else None
        pattern = None if phase.window is None else phase.window.pattern
        return Row(name, self.seed, accuracy, loss, self._keys(model, phase), kept, pattern)

    def pattern(self, model: Glm5, size: int) -> str:
        """The best pattern with equally many window and full layers, by loss on other held-out sequences."""

        def loss(pattern: str) -> float:
            window = WindowConfig(size=size, pattern=pattern)
            return held_out(model, self._searched, Phase(window=window))["held-out loss"]

        num_layers = model.cfg.num_hidden_layers
        return search_pattern(loss, num_layers, num_layers // 2)[0]

    def _keys(self, model: Glm5, phase: Phase) -> float:
        """The share of keys that the last token reads, mean over layers."""
        seq_len, num_layers = self.stage.seq_len, model.cfg.num_hidden_layers
        if phase.keys == "sparse":
            return min(1.0, model.cfg.index_topk / seq_len)
        if phase.window is None:
            return 1.0
        windowed = sum(phase.window.pattern_of(layer) == "S" for layer in range(num_layers))
        return 1 - windowed / num_layers * (1 - min(1.0, phase.window.size / seq_len))


def transitions(settings: TransitionConfig) -> list[Done]:
    """Run all trainings of all seeds."""
    recipe = read_recipe(settings.recipe, settings.set)
    beside = Path(settings.recipe).parent
    seeds = [Transition(recipe, seed, Path(settings.out)) for seed in settings.seeds]
    processes = settings.processes or os.cpu_count() or 1
    total = len(seeds) * (len(WINDOWS) + 4)
    # Spawned: a forked child would inherit locks that the parent's threads hold.
    with (
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
        Progress(total=total, unit="training", desc="transition") as progress,
    ):

        def start(transition: Transition, part: str, pattern: str | None = None) -> Future[Done]:
            return pool.submit(_train_and_measure, transition, part, beside, settings, pattern)

        done: list[Done] = []
        for found in _as_they_end(seeds, start):
            done.append(found)
            progress.update(1, seed=found.seed, part=found.part, accuracy=max(row.accuracy for row in found.rows))
    return done


def _as_they_end(seeds: Sequence[Transition], start: Callable[..., Future[Done]]) -> Iterator[Done]:
    """Results as they finish. After a seed's dense training, the trainings that start from its checkpoint follow."""
    first = {start(transition, "dense"): transition for transition in seeds}
    later: list[Future[Done]] = []
    for future in as_completed(first):
        found, transition = future.result(), first[future]
        yield found
        pattern = next(row.pattern for row in found.rows if row.name == PATTERN)
        later.append(start(transition, "dsa"))  # the longest
        later += [start(transition, name, each) for each, name in WINDOWS.items()]
        later += [start(transition, PATTERN, pattern), start(transition, DENSE_MORE)]
    for future in as_completed(later):
        yield future.result()


def _train_and_measure(
    transition: Transition, part: str, beside: Path, settings: TransitionConfig, pattern: str | None
) -> Done:
    """One training in its own process, with its log in a file. `pattern`: of its windows."""
    window = None if pattern is None else WindowConfig(size=settings.window, pattern=pattern)
    recipes = {"dense": transition.dense, "dsa": transition.dsa}
    recipe = recipes[part]() if part in recipes else transition.control(part, window)
    recipe.folder.mkdir(parents=True, exist_ok=True)
    began, began_cpu = time.perf_counter(), time.process_time()
    with (recipe.folder / "log.txt").open("w", encoding="utf-8") as log, redirect_stderr(log):
        train(recipe, beside, restart=True)
        torch.set_num_threads(recipe.threads or torch.get_num_threads())
        measure = Measure(transition, beside, settings.held_out)
        if part == "dense":
            rows = _of_dense(measure, _last(recipe), settings.window)
        elif part == "dsa":
            rows = [
                measure.row(name, _last(recipe, stage), Phase("sparse"), recall=True)
                for stage, name in enumerate((DSA_WARM, DSA))
            ]
        else:
            name = part if window is None else f"{part}, adapted"
            rows = [measure.row(name, _last(recipe), Phase(window=window))]
    return Done(part, transition.seed, rows, time.perf_counter() - began, time.process_time() - began_cpu)


def _of_dense(measure: Measure, model: Glm5, size: int) -> list[Row]:
    """Dense attention, and zero-shot results with windows and with selected keys."""
    windows = {name: WindowConfig(size=size, pattern=pattern) for pattern, name in WINDOWS.items()}
    windows[PATTERN] = WindowConfig(size=size, pattern=measure.pattern(model, size))
    rows = [measure.row(DENSE, model, Phase())]
    rows += [measure.row(name, model, Phase(window=window)) for name, window in windows.items()]
    return [*rows, measure.row(DSA_NEW, model, Phase("sparse"), recall=True)]


def _last(recipe: Recipe, stage: int = -1) -> Glm5:
    return load(recipe.folder / recipe.stage[stage].name / "last", device=device_of(recipe.device))
