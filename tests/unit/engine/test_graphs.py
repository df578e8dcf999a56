"""Decoding in pieces of static shape gives the tokens of steps as they are; on a GPU these pieces are graphs."""

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.runner.graphs.decode import Shape, context_buckets_of
from glm5.engine.sampling import SamplingParams
from glm5.engine.scheduler.messages import SetDepth
from glm5.kernels import kernel_count
from tests.support.models import random_model
from tests.support.running import Bench, greedy

NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def model():
    return random_model(11)


def prompts_of(rng, count=NUM_PROMPTS, longest=100):
    return [[rng.randrange(320) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("launch_ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("depth", [0, 3])
def test_greedy_answers_are_those_of_the_model(model, rng, launch_ahead, depth):
    prompts = prompts_of(rng)
    bench = Bench(model, depth=depth, launch_ahead=launch_ahead, fused=True)
    got = bench.run(prompts, SamplingParams(temperature=0, max_tokens=12)).tokens
    assert [got[i] for i in range(NUM_PROMPTS)] == [greedy(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("depth", [0, 2])
def test_every_kind_of_sampling(model, rng, depth):
    """Kinds that are captured, and others, in one batch and alone; what is reported of tokens comes along."""
    prompts = prompts_of(rng)
    kinds = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"top_p": 0.8, "top_k": 30},
        {"presence_penalty": 0.5, "logprobs": 2},
        {"bad_words": None, "logit_bias": {5: 2.0}, "min_tokens": 3},
        {"temperature": 0.7, "logprobs": 0},
    ]
    params = [SamplingParams(seed=i, max_tokens=16, **kind) for i, kind in enumerate(kinds)]
    plain = Bench(model, routing=True).run(prompts, params, routed=True)
    for chosen in (range(NUM_PROMPTS), range(2), [0]):
        some, own = [prompts[i] for i in chosen], [params[i] for i in chosen]
        got = Bench(model, depth=depth, fused=True, routing=True).run(some, own, routed=True)
        assert [got.tokens[n] for n in range(len(some))] == [plain.tokens[i] for i in chosen]
        for n, i in enumerate(chosen):
            ranks = [[entry.rank for entry in run.logprobs.get(at, [])] for run, at in ((got, n), (plain, i))]
            assert ranks[0] == ranks[1]
            masks = got.masks[n], plain.masks[i]
            # The last of what is kept may be near the first of what is not.
            assert all(len(own ^ other) <= 2 for own, other in zip(*masks, strict=True))
            assert bool(masks[0]) == ("top_k" in kinds[i])
            assert not masks[0] or all(token in mask for token, mask in zip(got.tokens[n], masks[0], strict=True))
            experts = [b"".join(part.experts for part in run.routed[at]) for run, at in ((got, n), (plain, i))]
            assert experts[0][: len(experts[1])] == experts[1][: len(experts[0])]


def test_depth_may_change_at_any_step(model, rng):
    prompts, params = prompts_of(rng), SamplingParams(seed=3, max_tokens=24)
    want = Bench(model).run(prompts, params).tokens
    bench = Bench(model, depth=3, fused=True)
    plan = bench.scheduler.plan

    def restless(step):
        bench.scheduler.deliver(step, [SetDepth(rng.randint(0, 3))])
        return plan(step)

    bench.scheduler.plan = restless
    assert bench.run(prompts, params).tokens == want


def test_padding_changes_nothing(model, rng):
    """What warms a graph up leaves every table of the slots as it is."""
    bench = Bench(model, depth=2, fused=True)
    bench.run(prompts_of(rng), SamplingParams(temperature=0, max_tokens=6))
    steps, slots = bench.runner.steps, bench.runner.slots
    tables = [slots.token_YS, slots.len_Y, slots.drafts_Y, slots.table_YP]
    before = [table[:-1].clone() for table in tables]
    pages = bench.runner.cache._page_bytes[:-1].clone()
    buffers = steps.buffers(Shape(4, 2))
    nobody = buffers.padding
    with torch.inference_mode():
        buffers.load(nobody)
        steps._target(buffers, steps.context_buckets[0])
        steps._sample(buffers, 0, nobody.sample_slot_T)
        steps._draft(buffers, steps.context_buckets[-1], 2, 0, nobody.sampling_slot_B)
    assert all(torch.equal(table[:-1], old) for table, old in zip(tables, before, strict=True))
    assert torch.equal(bench.runner.cache._page_bytes[:-1], pages)


def test_reaches_end_with_the_longest_context():
    top_k = preset("glm-5").index_topk
    assert context_buckets_of(top_k, 1000) == (1000,)
    assert context_buckets_of(top_k, 5000) == (2048, 4096, 5000)
    assert context_buckets_of(top_k, 202752) == (2048, 4096, 8192, 32768, 131072, 202752)


@pytest.mark.parametrize("depth", [0, 2])
def test_warming_up_leaves_everything_as_it_was(model, rng, depth):
    bench = Bench(model, depth=depth, fused=True)
    prompts, params = prompts_of(rng), SamplingParams(temperature=0, max_tokens=6)
    want = bench.run(prompts, params).tokens
    runner, slots = bench.runner, bench.runner.slots
    tables = [slots.token_YS, slots.len_Y, slots.drafts_Y, slots.table_YP]
    before = [table[:-1].clone() for table in tables]
    pages = runner.cache._page_bytes[:-1].clone()
    shapes = runner.prompts.shapes([16, 4])
    assert {shape.num_rows for shape in shapes} == {4, 16}
    assert {shape.context_bucket for shape in shapes} == set(runner.steps.context_buckets)
    for shape in shapes:
        runner.prompts.run_padding(shape)
    assert all(torch.equal(table[:-1], old) for table, old in zip(tables, before, strict=True))
    assert torch.equal(runner.cache._page_bytes[:-1], pages)
    again = bench.run(prompts, params).tokens
    assert [again[i] for i in range(NUM_PROMPTS)] == [want[i] for i in range(NUM_PROMPTS)]


def test_kernels_that_come_late_are_counted(caplog):
    kernel_count.start_counting()
    kernel_count.count("_attend")
    kernel_count.mark_ready()
    assert kernel_count.built_late() == 0
    assert not caplog.messages
    kernel_count.count("_attend")
    assert kernel_count.built_late() == 1
    assert "_attend" in caplog.text
    kernel_count.mark_ready()
