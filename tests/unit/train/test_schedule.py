"""Rates and batch sizes: their ends, their shapes, and that draws follow each other without gaps."""

import pytest

from glm5.config.train import StageConfig
from glm5.train.schedule import Schedule


def schedule(**values):
    given = {"name": "a", "kind": "pretrain", "steps": 100, "seq_len": 64, "sequences": 8, "lr": 1.0, **values}
    return Schedule(StageConfig.model_validate({**given, "data": [{"kind": "needle"}]}))


def test_the_rate_rises_then_falls_to_its_end():
    rates = [schedule(lr_warmup_steps=10).lr(step) for step in range(100)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.2), "a fifth, as published"
    assert schedule(final_lr=0.0).lr(99) == pytest.approx(0.0)


def test_shapes():
    middle = {
        shape: schedule(shape=shape, final_lr=0.0, steps=101).lr(25) for shape in ("cosine", "linear", "constant")
    }
    assert middle == pytest.approx({"cosine": 0.8535534, "linear": 0.75, "constant": 1.0})
    assert schedule(steps=1).lr(0) == 1.0


def test_batches_grow_and_no_draw_is_left_out_or_taken_twice():
    growing = schedule(first_sequences=2, growing_steps=6)
    sizes = [len(growing.draws(step)) for step in range(10)]
    assert sizes == [2, 3, 4, 5, 6, 7, 8, 8, 8, 8]
    assert [draw for step in range(10) for draw in growing.draws(step)] == list(range(sum(sizes)))
    assert schedule().draws(3) == range(24, 32)
