"""A policy's step by several ranks is that of one: losses, denominators and gradients, in float64 over gloo."""

from functools import cache

import pytest
import torch

from glm5.config.parallel import ParallelConfig
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.training.objective import Coefficients, RLObjective
from glm5.rl.training.packing import batch_of
from glm5.testing.numerics import rel_rms
from glm5.train.batch import Batch
from glm5.train.optim.build import INDEXER
from glm5.train.step import Phase
from tests.support.rl_batches import sequences
from tests.support.sharded import ROWS, Done, Job, alone, together

EXACT = 1e-9  # float64, sums in another order: 3e-14 measured
WAYS = {
    "2 ranks": Job(world=2),
    "4 ranks": Job(world=4),
    "experts": Job(world=2, parallel=ParallelConfig(expert=2)),
    "context": Job(world=2, parallel=ParallelConfig(context=2)),
    "pipeline": Job(world=2, parallel=ParallelConfig(pipeline=2)),
    "context and pipeline": Job(world=4, parallel=ParallelConfig(context=2, pipeline=2)),
}


def rl_rows(job: Job, step: int) -> list[Batch]:
    """Rows with all streams, of lengths that differ; the last has no policy tokens."""
    found = sequences(step, 61, PRESETS["gspo"], kept=True)
    rows = [batch_of(found[i :: len(ROWS)]) for i in range(len(ROWS))]
    rows[-1].columns["policy"].zero_()
    return [Batch(one.ids_T, (one.ids_T % 3 == 1).double(), one.lengths, None, one.columns, one.kept) for one in rows]


def trains(name: str) -> bool:
    return INDEXER not in name and ".layers.4." not in name


def job_of(way: Job, preset: str) -> Job:
    objective = RLObjective(PRESETS[preset], Coefficients(ref_kl=0.3, entropy=0.2, value=0.7, ce=0.4), chunk=7)
    settings = {
        "phase": Phase("sparse"),
        "steps": 1,
        "losses": LossConfig(mtp_depth=0, balance_step=0.0, balance_weight=0.01),
        "optimizer": OptimizerConfig(kind="adamw"),
        "objective": objective,
        "rows": rl_rows,
        "trains": trains,
        "config": (("value_head", True),),
    }
    return Job(world=way.world, parallel=way.parallel, **settings)


@cache
def reference(preset: str) -> Done:
    torch.set_num_threads(1)
    return alone(job_of(Job(), preset))


SLOW, LONG = ("4 ranks",), ("experts", "context and pipeline")


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW) + [pytest.mark.long] * (way in LONG)) for way in WAYS],
)
def test_ranks_together_take_the_step_of_one(way):
    """gspo has ratios of whole sequences, which context parallelism cuts."""
    want, got = reference("gspo"), together(job_of(WAYS[way], "gspo"))
    (want_metrics,), (metrics,) = want.metrics, got.metrics
    assert metrics.keys() == want_metrics.keys() >= {"policy", "ref_kl", "entropy", "value", "ce"}
    for name, value in want_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=EXACT, abs=EXACT), name
    (want_grads,), (grads,) = want.grads, got.grads
    assert grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        assert rel_rms(grads[name], grad) < EXACT, name
    for name, weight in want.weights.items():
        assert rel_rms(got.weights[name], weight) < EXACT, name
    control = reference("dis")
    assert abs(control.metrics[0]["policy"] - want_metrics["policy"]) > 1e-4
