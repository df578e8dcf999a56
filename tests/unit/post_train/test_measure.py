"""Held-out tasks: the same each time, all different, and none that a stage asks."""

import pytest

from glm5.common.errors import ConfigError
from glm5.post_train.measure import by_skill, draws_of, held_out
from glm5.rl.environments.table import make
from tests.unit.post_train.conftest import TEXT


def test_held_out_tasks_are_none_that_a_stage_asks(plan):
    made = plan()
    seeds = held_out(made.recipe, [made.stages[1].recipe])
    sort = make("sort")
    keys = [sort.task(seed, 0).key for seed in seeds["sort"]]
    trained = {sort.task(seed, 0).key for seed in (*range(30), *range(100, 110))}
    assert len(keys) == len(set(keys)) == 40
    assert not trained & set(keys)
    assert len(seeds["guess"]) == 15  # there are no more
    assert held_out(made.recipe, [made.stages[1].recipe]) == seeds
    draws = draws_of(made.recipe, seeds)
    assert [draw.number for draw in draws] == list(range(55))
    rewards = by_skill(seeds, [float(draw.number) for draw in draws])
    assert rewards["guess"] == [float(number) for number in range(40, 55)]


def test_tasks_that_are_all_trained_on_are_refused(plan):
    everything = plan(TEXT.replace("conversations = 30", "conversations = 10000"))
    with pytest.raises(ConfigError, match="skill sort: level 0 has no task left"):
        held_out(everything.recipe, [])


@pytest.mark.parametrize(
    ("new", "says"),
    [("kuhn", "skill kuhn: is self-play"), ('sort"\nlevel = 7\n#"', "skill sort: level: got 7; allowed: 0")],
)
def test_a_skill_that_cannot_be_measured(plan, new, says):
    made = plan(TEXT.replace('environment = "sort"', f'environment = "{new}"', 1))
    with pytest.raises(ConfigError, match=says):
        held_out(made.recipe, [])
