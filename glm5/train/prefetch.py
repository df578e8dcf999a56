"""Rows made ahead of the steps that train on them: by a thread, or by processes where that takes longer than training.

What a row holds follows from recipe, stage and the number of its draw, so it does not matter who makes it.
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
from glm5.train.data.sources import Mixed, Row

STEPS = 3
"""How many steps are made ahead."""

Ask = Callable[[int, int], Future[Row]]
"""(number of the stage, draw) to its row."""


@contextmanager
def rows_of(builder: Builder) -> Iterator[Ask]:
    """Somebody to ask for rows: `workers` processes, or a thread where the recipe asks for none."""
    recipe = builder.recipe
    if not recipe.workers:
        with _closing(ThreadPoolExecutor(1, "rows")) as pool:
            mixed = lru_cache(maxsize=2)(lambda number: builder.rows(recipe.stage[number]))
            yield lambda number, draw: pool.submit(lambda: mixed(number).row(draw))
        return
    # Not forked: a process that has used a GPU must not be.
    context = multiprocessing.get_context("spawn")
    where = (recipe.model_dump_json(), builder.beside, builder.out)
    pool = ProcessPoolExecutor(recipe.workers, context, _quiet, (os.getpid(),))
    with _closing(pool), _whole():
        yield lambda number, draw: pool.submit(_row, where, number, draw)


def ahead(ask: Ask, number: int, draws: Callable[[int], range], steps: range) -> Iterator[tuple[int, list[Row]]]:
    """Each step of a stage with the rows of its `draws`; those of the next ones are made meanwhile."""
    coming: deque[tuple[int, list[Future[Row]]]] = deque()
    for step in steps:
        coming.append((step, [ask(number, draw) for draw in draws(step)]))
        if len(coming) > STEPS:
            yield _made(coming)
    while coming:
        yield _made(coming)


def _made(coming: deque[tuple[int, list[Future[Row]]]]) -> tuple[int, list[Row]]:
    step, rows = coming.popleft()
    return step, [row.result() for row in rows]


def _row(where: tuple[str, Path, Path], number: int, draw: int) -> Row:
    return _mixed(where, number).row(draw)


@lru_cache(maxsize=2)
def _mixed(where: tuple[str, Path, Path], number: int) -> Mixed:
    text, beside, out = where
    recipe = Recipe.model_validate_json(text)
    return Builder(recipe, beside, out).rows(recipe.stage[number])


def _quiet(parent: int) -> None:
    """One thread each, behind the process that trains; Ctrl-C is for that one, which then ends these."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    torch.set_num_threads(1)


@contextmanager
def _whole() -> Iterator[None]:
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
