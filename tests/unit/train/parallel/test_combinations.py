"""Training by several processes is training by one: losses of three steps and all gradients.

In float64 they differ by the order of sums alone. In float32 a choice of experts or keys may flip on that: there, in
one step, the choices of the one process are followed, and those that would have been others counted.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from glm5.config.parallel import ParallelConfig
from glm5.config.step import LoraConfig
from glm5.train.step import Phase
from tests.support.rounding import logit_rounding
from tests.support.sharded import Done, Job, alone, together

EXACT = 1e-9  # float64; 5e-13 measured
# float32, of one step: losses, relative, and gradients, of the largest of their tensor, behind twice as many products.
# No bound holds for what later steps make of it: AdamW and Muon turn rounding of small gradients into steps.
CLOSE = 2**0.5 * logit_rounding(Job().cfg)
WAYS = {
    "2: data": (2, {}),
    "2: experts": (2, {"expert": 2}),
    "2: experts, gathered": (2, {"expert": 2, "dispatch": "all-gather"}),
    "2: context": (2, {"context": 2}),
    "2: pipeline": (2, {"pipeline": 2}),
    "2: pipeline, zero bubble": (2, {"pipeline": 2, "schedule": "zero-bubble"}),
    "4: data": (4, {}),
    "4: data, experts": (4, {"expert": 2}),
    "4: data, context": (4, {"context": 2}),
    "4: context, experts": (4, {"context": 2, "expert": 2}),
    "4: pipeline, data": (4, {"pipeline": 2}),
    "4: pipeline, experts": (4, {"pipeline": 2, "expert": 2}),
    "4: pipeline, context": (4, {"pipeline": 2, "context": 2}),
    "4: pipeline, context, experts, zero bubble": (
        4,
        {"pipeline": 2, "context": 2, "expert": 2, "schedule": "zero-bubble"},
    ),
}

ROUND = (("index_topk_pattern", "FFFF"),)  # four layers that a stage may begin with
SEVERAL = {
    "2: two stages a rank": (2, {"pipeline": 2, "stages": 2}),
    "2: two stages a rank, zero bubble": (2, {"pipeline": 2, "stages": 2, "schedule": "zero-bubble"}),
    "4: two stages a rank, experts": (4, {"pipeline": 2, "stages": 2, "expert": 2}),
    "4: two stages a rank, context, zero bubble": (
        4,
        {"pipeline": 2, "stages": 2, "context": 2, "schedule": "zero-bubble"},
    ),
}


def dealt(job: Job, way: str) -> Job:
    world, settings = (WAYS | SEVERAL)[way]
    return replace(job, world=world, parallel=ParallelConfig(**settings))


@cache
def reference() -> Done:
    return alone(Job())


@cache
def first_step_in_float32() -> Done:
    return alone(Job(dtype=torch.float32, steps=1, records=True))


def distance(got: Done, want: Done) -> tuple[float, float]:
    """Of losses, relative, and of gradients, relative to the largest of their tensor; over all steps."""
    losses, grads = 0.0, 0.0
    for a, b in zip(got.metrics, want.metrics, strict=True):
        assert a.keys() == b.keys()
        losses = max(losses, *(abs(a[name] - b[name]) / max(abs(b[name]), 1e-3) for name in b))
    for a, b in zip(got.grads, want.grads, strict=True):
        assert a.keys() == b.keys()
        grads = max(grads, *(((a[k] - b[k]).abs().max() / b[k].abs().max().clamp_min(1e-12)).item() for k in b))
    return losses, grads


def test_two_processes_with_their_own_experts_are_one():
    """Parameters in shards, experts dealt out, Muon over cut matrices, loads counted over both."""
    job = Job(steps=2)
    want, got = alone(job), together(dealt(job, "2: experts"))
    assert max(distance(got, want)) < EXACT
    assert got.weights.keys() == want.weights.keys()
    assert max((got.weights[name] - one).abs().max().item() for name, one in want.weights.items()) < EXACT


def test_adapters_over_two_processes_are_those_of_one():
    job = Job(steps=2, lora=LoraConfig(rank=3))
    want, got = alone(job), together(dealt(job, "2: experts"))
    assert all(".lora_" in name for name in want.grads[0])
    assert max(distance(got, want)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2: data", "2: context", "2: pipeline, zero bubble", "4: pipeline, experts"])
def test_adapters_in_other_ways(way):
    job = Job(lora=LoraConfig(rank=3, targets=("q_b_proj", "o_proj", "down_proj")))
    losses, grads = distance(together(dealt(job, way)), alone(job))
    print(f"{way}, adapters: losses {losses:.1e}, gradients {grads:.1e}")
    assert max(losses, grads) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_several_processes_are_one(way):
    got = together(dealt(Job(), way))
    losses, grads = distance(got, reference())
    print(f"{way}: losses {losses:.1e}, gradients {grads:.1e}")
    assert max(losses, grads) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("way", SEVERAL)
def test_ranks_with_several_stages_are_one_process(way):
    job = Job(config=ROUND)
    losses, grads = distance(together(dealt(job, way)), alone(job))
    print(f"{way}: losses {losses:.1e}, gradients {grads:.1e}")
    assert max(losses, grads) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"expert": 3}], ids=str)
def test_four_rows_over_three_processes(settings):
    """Two of the first, one of each other."""
    job = Job(world=3, parallel=ParallelConfig(**settings), merged=True, config=(("n_routed_experts", 9),))
    losses, grads = distance(together(job), alone(job))
    print(f"3 processes, 4 rows {settings}: losses {losses:.1e}, gradients {grads:.1e}")
    assert max(losses, grads) < EXACT


@pytest.mark.slow
def test_other_rows_on_one_rank_are_noticed():
    """The control."""
    got = together(replace(dealt(Job(), "2: data"), skewed=True))
    assert min(distance(got, reference())) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2: data", "2: pipeline", "4: context, experts", "2: two stages a rank"])
def test_warm_up_and_dense_stages_too(way):
    for phase, trains in ((Phase("warmup", learn_index=True), is_indexer), (Phase("dense"), is_trunk)):
        job = Job(phase=phase, trains=trains, steps=2, config=ROUND if way in SEVERAL else ())
        losses, grads = distance(together(dealt(job, way)), alone(job))
        print(f"{way}, {phase.keys}: losses {losses:.1e}, gradients {grads:.1e}")
        assert max(losses, grads) < EXACT


def is_indexer(name: str) -> bool:
    return ".indexer." in name


def is_trunk(name: str) -> bool:
    return ".indexer." not in name


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2: data", "2: experts", "2: context", "2: pipeline", "4: context, experts"])
def test_in_float32_with_the_choices_of_one_process(way):
    want = first_step_in_float32()
    job = Job(dtype=torch.float32, steps=1, replays=want.choices)
    got = together(dealt(job, way))
    losses, grads = distance(got, want)
    flips = f"{got.flips[0]} of {got.flips[1]} choices flipped"
    print(f"{way}: losses {losses:.1e}, gradients {grads:.1e}, {flips}; {CLOSE=:.1e}")
    assert max(losses, grads) < CLOSE
    assert got.flips[0] < 0.01 * got.flips[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2: data", "2: experts", "2: two stages a rank"])
def test_in_bfloat16_losses_stay_close(way):
    """Passes in bfloat16, weights and sums of gradients in float32, as on GPUs (tests/gpu/test_sharded_cuda.py)."""
    job = Job(dtype=torch.float32, compute=torch.bfloat16, config=ROUND)
    want, got = alone(job), together(dealt(job, way))
    off = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(got.metrics, want.metrics, strict=True)]
    print(f"{way}, bfloat16: losses {' '.join(f'{one:.1e}' for one in off)}")
    assert off[0] < 0.01  # experts that are dealt out round otherwise
    assert max(off) < 0.1  # choices flip
