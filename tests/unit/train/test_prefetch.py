"""Rows made ahead: in order, and the same whoever makes them."""

from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

from glm5.common.errors import TrainingError
from glm5.train.build import Builder
from glm5.train.prefetch import _row, prefetch_rows, row_workers
from glm5.train.schedule import Schedule
from tests.support.training import recipe, stage


@pytest.fixture
def builder(tmp_path):
    of = recipe(tmp_path, "out", stage(steps=7, first_sequences=1, growing_steps=3))
    return Builder(of, tmp_path, tmp_path / "out")


def test_every_step_has_the_rows_of_its_draws(builder):
    schedule = Schedule(builder.recipe.stage[0])
    rows = builder.rows(builder.recipe.stage[0])
    with row_workers(builder) as request_row:
        steps = list(prefetch_rows(request_row, 0, schedule.draws, range(2, 7)))
    assert [step for step, _ in steps] == [2, 3, 4, 5, 6]
    for step, made in steps:
        wanted = [rows.row(draw).ids for draw in schedule.draws(step)]
        assert all(np.array_equal(row.ids, ids) for row, ids in zip(made, wanted, strict=True))


def test_a_process_makes_the_same_row(builder):
    where = (builder.recipe.model_dump_json(), builder.beside, builder.out)
    rows = builder.rows(builder.recipe.stage[0])
    assert all(np.array_equal(_row(where, 0, draw).ids, rows.row(draw).ids) for draw in range(3))


@pytest.mark.slow
def test_processes_make_rows(tmp_path):
    of = recipe(tmp_path, "out", settings=["workers=2"])
    builder = Builder(of, tmp_path, tmp_path / "out")
    rows = builder.rows(of.stage[0])
    with row_workers(builder) as request_row:
        requested = [request_row(0, draw) for draw in range(5)]
        assert all(np.array_equal(row.result().ids, rows.row(draw).ids) for draw, row in enumerate(requested))


def test_a_process_that_was_killed_is_named(tmp_path):
    of = recipe(tmp_path, "out", settings=["workers=1"])
    with (
        pytest.raises(TrainingError, match=r"makes sequences was killed .* --set workers=0"),
        row_workers(Builder(of, tmp_path, tmp_path / "out")),
    ):
        raise BrokenProcessPool("a child process terminated abruptly")
