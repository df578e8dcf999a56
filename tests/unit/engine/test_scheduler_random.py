"""Thousands of random schedules on a device whose keys can be told apart; see `tests/support/scheduling`.

Controls: every rule has schedulers that break it, and each of those must be noticed.
"""

import pytest

from tests.support.scheduling.mutants import MUTANTS
from tests.support.scheduling.world import Rates, World

NUM_BLOCKS, WORLDS_PER_BLOCK = 20, 100
WORLDS_PER_MUTANT = 400
# The hardest to notice, after 4 to 5 s.
HARDEST = {"a shared prompt is told as new", "a page is told as old in the tree alone"}


def seeds(block: int, count: int) -> range:
    return range(block * count, (block + 1) * count)


def run(seed: int, **options) -> World:
    try:
        return World(seed, **options).run()
    except Exception as error:
        error.add_note(f"seed {seed} of World({options})")
        raise


@pytest.mark.parametrize(
    "block", [*range(5), *(pytest.param(block, marks=pytest.mark.long) for block in range(5, NUM_BLOCKS))]
)
def test_random_schedules(block):
    worlds = [run(seed) for seed in seeds(block, WORLDS_PER_BLOCK)]
    assert sum(world.num_preempted for world in worlds) > WORLDS_PER_BLOCK // 2, "too little happens"
    assert sum(world.num_ended for world in worlds) > WORLDS_PER_BLOCK * Rates().num_requests


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, marks=[pytest.mark.long] * (one.rule in HARDEST)) for one in MUTANTS],
    ids=lambda mutant: mutant.rule.replace(" ", "-"),
)
def test_a_broken_rule_is_noticed(mutant):
    broken = mutant.scheduler()
    for seed in range(WORLDS_PER_MUTANT):
        try:
            World(seed, rates=Rates(control=0.3 if seed % 2 else 0.1), make=broken).run()
        except Exception as error:  # noqa: BLE001  (a broken scheduler fails in any way)
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail(f"nothing noticed that {mutant.rule}")


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.long) for block in range(1, 10))])
def test_long_random_schedules(block):
    for seed in seeds(1000 + block, 100):
        run(seed, rates=Rates(num_requests=60, abort=0.02, finish=0.02, control=0.03))
