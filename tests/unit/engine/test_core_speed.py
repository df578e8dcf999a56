"""Host time of a turn with 256 running sequences and no model, printed: the scheduler's part and all of it.

Measured on one core of an AMD EPYC that others used too, launch-ahead, every end followed by a new request: median
0.66 ms a turn without drafts, of which 0.41 ms are the scheduler's; 0.83 and 0.54 ms with 3.
"""

import statistics
import time
from random import Random

import pytest

from glm5.engine.runner.result import StepResult
from tests.support.core_driver import CoreDriver
from tests.support.fake_runner import Launched

NUM_SEQS, NUM_TURNS = 256, 400


class Instant:
    """A runner that takes no time: its steps are ready when they are launched."""

    def __init__(self, rng: Random, max_depth: int):
        self.rng, self.max_depth = rng, max_depth
        self.spent = 0.0

    def launch(self, plan, specs):
        start = time.thread_time()
        result = StepResult(num_drafted=[NUM_SEQS] * self.max_depth, num_accepted=[100] * self.max_depth)
        for item in plan.items:
            if item.samples:
                result.tokens[item.seq_id] = [7] * self.rng.randint(1, 1 + item.depth)
                result.drafts[item.seq_id] = [7] * self.max_depth
        self.spent += time.thread_time() - start
        return Launched(result)

    def set_bitmasks(self, slots, masks) -> None:
        raise AssertionError("nobody has a grammar")

    def weights_changed(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3])
def test_host_time_of_a_turn(depth, rng):
    driver = CoreDriver(
        page_size=64,
        num_pages=20 * NUM_SEQS,
        max_num_seqs=NUM_SEQS,
        max_tokens_per_step=8192,
        max_model_len=4096,
        max_depth=depth,
    )
    core = driver.core
    core.runner = runner = Instant(rng, depth)
    whole, planning = [], []
    scheduler, clock = core.scheduler, {"spent": 0.0}

    def timed(method):
        def call(*args):
            start = time.thread_time()
            out = method(*args)
            clock["spent"] += time.thread_time() - start
            return out

        return call

    for name in ("deliver", "plan", "apply"):
        setattr(scheduler, name, timed(getattr(scheduler, name)))
    for _ in range(NUM_TURNS):
        for _ in range(NUM_SEQS - len(core._replies)):
            driver.ask(rng.randint(16, 256), rng.randint(256, 2048))
        core.step()
        clock["spent"], runner.spent = 0.0, 0.0
        start = time.thread_time()
        core.step()
        spent = time.thread_time() - start - runner.spent
        if len(scheduler.decoding) == NUM_SEQS:
            whole.append(spent)
            planning.append(clock["spent"])
    for name, seconds in (("turn", whole), ("scheduler", planning)):
        median, p90, p99 = (statistics.quantiles(seconds, n=100)[i] * 1e3 for i in (49, 89, 98))
        print(f"{depth=} {name}: median {median:.3f} ms, p90 {p90:.3f} ms, p99 {p99:.3f} ms of {len(seconds)} turns")
    assert len(whole) > NUM_TURNS // 4
