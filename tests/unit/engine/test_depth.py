"""The depth follows acceptance and load, does not flutter, and tries again what it gave up."""

from itertools import pairwise
from random import Random

import pytest

from glm5.config.presets import preset
from glm5.engine.core.depth import PROBE_EVERY, AdaptiveDepth, Machine, StepCost
from tests.support.core_driver import CoreDriver

# A step of 1 to about 100 rows costs the same.
COST = StepCost(Machine(1e-3, 1e-3, 1e12, 1e12), 4, 1e6, 0, 1.0, 2e7, 1e6)


def simulated(depth: AdaptiveDepth, rng: Random, num_steps: int, num_seqs: int, chance: float) -> list[int]:
    """Depths chosen over steps in which a draft stands with `chance`, if those before it do."""
    chosen = []
    for _ in range(num_steps):
        k = depth.choose(num_seqs)
        chosen.append(k)
        drafted, accepted = [num_seqs if j < k else 0 for j in range(depth.max_depth)], [0] * depth.max_depth
        for _ in range(num_seqs):
            for position in range(k):
                if rng.random() >= chance:
                    break
                accepted[position] += 1
        depth.observe(drafted, accepted)
    return chosen


def settled(chosen: list[int]) -> int:
    """The depth of most of the later steps."""
    later = chosen[len(chosen) // 2 :]
    return max(set(later), key=later.count)


def test_ranks_share_weights_and_products_but_add_up():
    cfg = preset("glm-5")
    alone, eight = (StepCost.of(cfg, 1.0, "cuda", num_ranks) for num_ranks in (1, 8))
    for num_seqs, depth in [(1, 0), (64, 3)]:
        assert alone.seconds(num_seqs, depth) / 8 < eight.seconds(num_seqs, depth) < alone.seconds(num_seqs, depth) / 2
    # docs/performance.md: 7 ms for one sequence, 40 for 128.
    assert 5e-3 < eight.seconds(1, 0) < 9e-3
    assert 3e-2 < eight.seconds(128, 0) < 5e-2


def test_rows_that_fit_a_time():
    cost = StepCost.of(preset("glm-5"), 1.0, "cuda", 8)
    rows = cost.rows_within(0.05, 8192)
    assert cost.seconds_of_rows(rows) <= 0.05 < cost.seconds_of_rows(rows + 1)
    assert cost.rows_within(1e-6, 8192) == 1
    assert cost.rows_within(100.0, 8192) == 8192


def test_good_drafts_are_taken_bad_ones_are_not(rng):
    assert settled(simulated(AdaptiveDepth(5, COST), rng, 400, 4, 0.9)) >= 4
    assert settled(simulated(AdaptiveDepth(5, COST), rng, 400, 4, 0.05)) == 0
    assert 0 < settled(simulated(AdaptiveDepth(5, COST), rng, 400, 4, 0.5)) < 5


def test_load_costs_depth(rng):
    depth = AdaptiveDepth(5, COST)
    simulated(depth, rng, 300, 1, 0.8)  # until what stands is known
    alone = settled(simulated(depth, rng, 300, 1, 0.8))
    crowd = settled(simulated(depth, rng, 300, 512, 0.8))
    assert alone > crowd
    assert settled(simulated(depth, rng, 300, 1, 0.8)) >= alone - 1, "and back, without waiting for a probe"


def test_a_load_that_is_known_to_be_too_much_is_drafted_for_from_the_first_step():
    assert AdaptiveDepth(5, COST).choose(4) > 0
    assert AdaptiveDepth(5, COST).choose(4096) == 0


def test_it_does_not_flutter(rng):
    chosen = simulated(AdaptiveDepth(5, COST), rng, 900, 8, 0.7)[200:]
    assert sum(a != b for a, b in pairwise(chosen)) < 12


def test_what_was_given_up_is_tried_again(rng):
    depth = AdaptiveDepth(3, COST)
    assert settled(simulated(depth, rng, 500, 4, 0.0)) == 0
    assert settled(simulated(depth, rng, 5 * PROBE_EVERY, 4, 0.95)) == 3


def test_the_same_steps_give_the_same_depths(seed):
    first = simulated(AdaptiveDepth(4, COST), Random(seed), 300, 6, 0.6)
    assert first == simulated(AdaptiveDepth(4, COST), Random(seed), 300, 6, 0.6)


@pytest.mark.parametrize("name", ["tiny", "nano", "glm-5", "glm-5.2"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_costs_of_real_models_grow_with_rows_and_depth(name, device):
    cost = StepCost.of(preset(name), 2, device)
    times = [cost.seconds(num_seqs, 0) for num_seqs in (1, 8, 64, 512)]
    assert 0 < times[0] < times[1] < times[2] < times[3]
    assert times[3] < 512 * times[0], "rows together are cheaper than alone"
    assert cost.seconds(8, 3) > cost.seconds(8, 0)


@pytest.mark.parametrize("launch_ahead", [True, False])
@pytest.mark.parametrize("quality", [0, 8])
def test_the_engine_adapts_and_tokens_do_not_change(launch_ahead, quality):
    driver = CoreDriver(launch_ahead=launch_ahead, max_depth=3, adaptive=COST, draft_quality=quality)
    for number in range(8):
        driver.ask(5, max_tokens=190, seed=number)
    driver.run()
    driver.check()
    depths = {plan.depth for plan in driver.runner.plans[-20:] if plan.items}
    assert depths <= ({3} if quality == 8 else {0}) | {plan.depth for plan in driver.runner.plans[-2:]}
