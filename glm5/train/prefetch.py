"""Prefetches rows of training data, in a thread or in worker processes.

A row depends only on recipe, stage and the number of its draw, so any worker can make it.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from glm5.common.errors import TrainingError
from glm5.common.interrupt import end_with_parent
from glm5.config.train import Recipe
from glm5.train.build import Builder
from glm5.train.data.sources import MixedRows, Row

STEPS_AHEAD = 3
"""Number of steps whose rows are made in advance."""

RequestRow = Callable[[int, int], Future[Row]]
"""(index of the stage, draw) -> future of its row."""


@contextmanager
def row_workers(builder: Builder) -> Iterator[RequestRow]:
    """A function that requests rows: from `workers` processes, or from a thread if the recipe has no workers."""
    recipe = builder.recipe
    if not recipe.workers:
        with _closing(ThreadPoolExecutor(1, "rows")) as pool:
            mixed = lru_cache(maxsize=2)(lambda number: builder.rows(recipe.stage[number]))
            yield lambda number, draw: pool.submit(lambda: mixed(number).row(draw))
        return
    # Spawned: a process that has used a GPU must not fork.
    context = multiprocessing.get_context("spawn")
    where = (recipe.model_dump_json(), builder.beside, builder.out)
    pool = ProcessPoolExecutor(recipe.workers, context, _start_worker, (os.getpid(),))
    with _closing(pool), _worker_death_as_error():
        yield lambda number, draw: pool.submit(_row, where, number, draw)


def prefetch_rows(
    request_row: RequestRow, number: int, draws: Callable[[int], range], steps: range
) -> Iterator[tuple[int, list[Row]]]:
    """Each step of a stage with the rows of its `draws`, while the rows of the next steps are made."""
    pending: deque[tuple[int, list[Future[Row]]]] = deque()
    for step in steps:
        pending.append((step, [request_row(number, draw) for draw in draws(step)]))
        if len(pending) > STEPS_AHEAD:
            yield _wait_for_rows(pending)
    while pending:
        yield _wait_for_rows(pending)


def _wait_for_rows(pending: deque[tuple[int, list[Future[Row]]]]) -> tuple[int, list[Row]]:
    step, rows = pending.popleft()
    return step, [row.result() for row in rows]


def _row(where: tuple[str, Path, Path], number: int, draw: int) -> Row:
    return _mixed(where, number).row(draw)


@lru_cache(maxsize=2)
def _mixed(where: tuple[str, Path, Path], number: int) -> MixedRows:
    text, beside, out = where
    recipe = Recipe.model_validate_json(text)
    return Builder(recipe, beside, out).rows(recipe.stage[number])


def _start_worker(parent: int) -> None:
    """One torch thread and a low priority. Ctrl-C is left to the training process, which ends the workers."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    torch.set_num_threads(1)


@contextmanager
def _worker_death_as_error() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise TrainingError(
            "a process that makes sequences was killed (out of memory?); the state is that of the last checkpoint, and "
            "the same command goes on from there; --set workers=0 needs no such processes"
        ) from None


@contextmanager
def _closing(pool: Executor) -> Iterator[Executor]:
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
