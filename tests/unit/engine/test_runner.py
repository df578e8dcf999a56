"""Steps on a real model: the tokens of computing everything anew, however the work was cut, batched and drafted."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from glm5.config.presets import preset
from glm5.engine.runner import result
from glm5.engine.runner.inputs import slot_state
from glm5.engine.sampling import SamplingParams
from glm5.engine.sampling.params import StructuredOutputsParams, answer_seeds
from glm5.engine.scheduler.messages import SetDepth
from glm5.engine.transport.wire import TokenLogprobs
from tests.support.models import random_model
from tests.support.rounding import logit_rounding
from tests.support.running import Bench, check_logprobs, experts_of, greedy, logprobs_of

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model():
    return random_model(11)


@pytest.fixture(scope="module")
def sharing():
    """Layers and drafts that reuse an earlier selection, as in GLM-5.2."""
    cfg = preset("tiny").model_copy(update={"index_share_for_mtp_iteration": True})
    return random_model(12, cfg)


def random_prompts(rng, count, longest=150):
    return [[rng.randrange(320) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("launch_ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("chunk", [7, pytest.param(None, marks=pytest.mark.long)], ids=["chunks of 7", "whole"])
def test_greedy_answers_are_those_of_the_model(model, rng, launch_ahead, depth, chunk):
    prompts = random_prompts(rng, 6)
    bench = Bench(model, depth=depth, launch_ahead=launch_ahead, max_prompt_chunk=chunk)
    got = bench.run(prompts, SamplingParams(temperature=0, max_tokens=12)).tokens
    assert [got[i] for i in range(6)] == [greedy(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("name", ["model", pytest.param("sharing", marks=pytest.mark.long)])
def test_sampled_answers_do_not_depend_on_the_way(request, rng, name):
    """Depth, launch-ahead, chunks, batch size, preemption, a warm cache: none of it shows in a seeded answer."""
    model = request.getfixturevalue(name)
    # Most answers outgrow the page that their prompt ends in.
    prompts = [[rng.randrange(320) for _ in range(rng.choice([50, 55, 60]))] for _ in range(5)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.5, 1.0]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=number,
            max_tokens=rng.randint(16, 24),
        )
        for number in range(5)
    ]
    want = Bench(model, launch_ahead=False, max_num_seqs=1, max_tokens_per_step=256).run(prompts, params).tokens
    for depth in (0, 4):
        bench = Bench(model, depth=depth)
        assert bench.run(prompts, params).tokens == want, "cold"
        assert bench.run(prompts, params).tokens == want, "warm"
        scarce = Bench(model, depth=depth, num_pages=4, headroom=0.0)
        run = scarce.run(prompts, params)
        assert run.tokens == want, "preempted"
        assert run.num_preempted > 0


def test_drafts_are_accepted_and_answers_stay(model, rng):
    """A model that repeats itself is easy to draft for: fewer steps, the same tokens."""
    prompt = random_prompts(rng, 1)[0]
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias={5: 100.0})
    plain, fast = Bench(model).run([prompt], params), Bench(model, depth=3).run([prompt], params)
    assert fast.tokens == plain.tokens
    assert fast.num_accepted == fast.num_drafted
    assert len(fast.plans) < 0.35 * len(plain.plans)


def test_drafts_that_are_not_what_the_rows_saw_would_show(model, rng):
    """The control: were the token table not kept in step with the drafts, wrong tokens would stand."""
    prompts = random_prompts(rng, 6)
    # Few tokens to choose from: many drafts stand.
    params = SamplingParams(temperature=0, max_tokens=40, logit_bias={5: 30, 6: 30, 7: 30})
    bench = Bench(model, depth=3)
    want = bench.run(prompts, params).tokens
    slots = bench.runner.slots

    def wrong(sampling_slot_B):
        slots.token_YS[sampling_slot_B, slots.len_Y[sampling_slot_B]] = 9

    slots.assume = wrong
    assert bench.run(prompts, params).tokens != want


def test_depth_may_change_at_any_step(model, rng):
    """Drafts that were made for another depth, or not at all, are only guesses."""
    prompts, params = random_prompts(rng, 6), SamplingParams(seed=3, max_tokens=30)
    want = Bench(model).run(prompts, params).tokens
    bench = Bench(model, depth=4)
    plan = bench.scheduler.plan

    def restless(step):
        bench.scheduler.deliver(step, [SetDepth(rng.randint(0, 4))])
        return plan(step)

    bench.scheduler.plan = restless
    assert bench.run(prompts, params).tokens == want


def test_where_nothing_is_drafted_the_draft_layer_sees_prompts_alone(model, rng):
    prompts, params = random_prompts(rng, 3), SamplingParams(temperature=0, max_tokens=20)
    bench = Bench(model, depth=2)
    plan, draft, rows = bench.scheduler.plan, bench.runner.passes.draft, []

    def without_drafts(step):
        bench.scheduler.deliver(step, [SetDepth(0)])
        return plan(step)

    def noting(ids_T, *args):
        rows.append(len(ids_T))
        return draft(ids_T, *args)

    bench.scheduler.plan, bench.runner.passes.draft = without_drafts, noting
    run = bench.run(prompts, params)
    assert run.tokens == Bench(model).run(prompts, params).tokens
    with_prompts = [plan for plan in run.plans if any(item.kind == "prefill" for item in plan.items)]
    assert len(rows) == len(with_prompts) < len(run.plans)


@pytest.mark.parametrize("depth", [0, 3])
def test_log_probabilities_are_the_models_own(model, rng, depth):
    prompts = random_prompts(rng, 5, longest=60)
    params = SamplingParams(temperature=TEMPERATURE, seed=1, max_tokens=20, logprobs=3, prompt_logprobs=2)
    tolerance = logit_rounding(model.cfg)
    run = Bench(model, depth=depth).run(prompts, params)
    for number, prompt in enumerate(prompts):
        logprob_TW = logprobs_of(model, prompt + run.tokens[number])
        scaled_TW = (logprob_TW / TEMPERATURE).log_softmax(dim=-1)
        shown = [*run.prompt_logprobs.get(number, []), *run.logprobs[number]]
        assert [entry.token_id for entry in shown] == (prompt + run.tokens[number])[1:]
        for position, entry in enumerate(shown):
            check_logprobs(entry, logprob_TW[position], tolerance)
            want = scaled_TW[position, entry.token_id]
            assert abs(entry.tempered - want) < logit_rounding(model.cfg, TEMPERATURE)


def test_log_probabilities_that_are_not_the_models_would_show(model):
    """The control: another value, rank or choice by a thousandth of the logits' scale."""
    row_W = logprobs_of(model, [3, 4, 5])[-1]
    best = row_W.topk(4)
    token_id, second = best.indices[:2].tolist()
    reported = [(id_, value, value) for id_, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    right = TokenLogprobs(token_id, reported[0][1], reported[0][1], 1, reported[:2])
    check_logprobs(right, row_W, logit_rounding(model.cfg))
    for wrong in (
        {"logprob": right.logprob + 1e-3},
        {"rank": 2},
        {"token_id": second, "logprob": reported[1][1]},
        {"likeliest": [reported[0], reported[2]]},
        {"likeliest": [reported[0], (second, reported[1][1] + 1e-3, 0.0)]},
    ):
        with pytest.raises(AssertionError):
            check_logprobs(msgspec.structs.replace(right, **wrong), row_W, logit_rounding(model.cfg))


@pytest.mark.parametrize("depth", [0, 2])
def test_routed_experts_are_the_routers(model, rng, depth):
    prompts = random_prompts(rng, 5, longest=90)
    bench = Bench(model, depth=depth, routing=True)
    run = bench.run(prompts, SamplingParams(temperature=0, max_tokens=15), routed=True)
    for number, prompt in enumerate(prompts):
        ids = prompt + run.tokens[number]
        want_TLA = experts_of(model, ids)[:-1]
        got_TLA = np.full(want_TLA.shape, -1)
        for part in run.routed[number]:
            experts = np.frombuffer(part.experts, dtype="<i2").reshape(part.shape)
            got_TLA[part.start : part.start + len(experts)] = experts[: len(got_TLA) - part.start]
        assert np.array_equal(got_TLA, want_TLA)


def test_answers_to_one_prompt_share_its_pages(model, rng):
    prompt = random_prompts(rng, 1, longest=150)[0] + [1] * 70
    seeds = answer_seeds(40, 4)
    alone = [Bench(model).run([prompt], SamplingParams(seed=seed, max_tokens=10)).tokens[0] for seed in seeds]
    together = Bench(model, depth=2).run([prompt], SamplingParams(n=4, seed=40, max_tokens=10))
    assert [together.tokens[i] for i in range(4)] == alone
    computed = sum(item.num_rows for plan in together.plans for item in plan.items if item.kind == "prefill")
    assert computed < len(prompt) + 4 * 64


def test_shapes_are_few_and_static(model, rng):
    """What the model is run with depends on the bucket alone: what a graph is captured for."""
    bench = Bench(model, depth=2, batch_buckets=(1, 2, 4, 8))
    shapes: dict[object, set[object]] = {}
    forward = bench.runner.passes.hidden

    def hidden(ids_T, view):
        key = (plans[-1].bucket, view.table_BP.shape[1])
        shape = (ids_T.shape, view.table_BP.shape, view.end_T.shape)
        shapes.setdefault(key, set()).add(shape)
        return forward(ids_T, view)

    plans = []
    plan = bench.scheduler.plan
    bench.scheduler.plan = lambda step: plans.append(plan(step)) or plans[-1]
    bench.runner.passes.hidden = hidden
    bench.run(random_prompts(rng, 20), [SamplingParams(seed=i, max_tokens=rng.randint(1, 30)) for i in range(20)])
    assert all(len(found) == 1 for found in shapes.values())
    assert {bucket.num_seqs for bucket, _ in shapes} <= {1, 2, 4, 8}


def test_padding_writes_to_the_dump_page_alone(model, rng):
    """Pages of nobody keep what they hold, whatever is computed beside them."""
    bench = Bench(model, depth=3, num_pages=32, prefix_cache=False)
    parts = bench.runner.cache.parts()
    for part in parts.values():
        part.fill_(7)
    prompts = random_prompts(rng, 3, longest=60)
    used = set()
    launch = bench.runner.launch

    def spying(plan, specs):
        used.update(page for one in plan.entered for page in one.pages)
        used.update(entry.page for entry in plan.table)
        return launch(plan, specs)

    bench.runner.launch = spying
    bench.run(prompts, SamplingParams(seed=1, max_tokens=20))
    unused = [page for page in range(32) if page not in used]
    assert used
    assert unused
    assert all(bool((part[unused] == 7).all()) for part in parts.values())


@pytest.mark.parametrize("fused", [False, True], ids=["whole", "in pieces"])
def test_who_waits_for_a_prompt_waits_for_the_model_alone(model, monkeypatch, fused):
    """What the sampler must know is told once it runs, and tokens start for the host before the draft layer runs."""
    bench, order = Bench(model, depth=2, fused=fused), []

    def noting(owner, name):
        known = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: order.append(name) or known(*args))

    noting(bench.runner.passes, "hidden")
    noting(bench.runner.sampler, "place")
    noting(result.Launched, "__init__")
    noting(bench.runner.passes, "draft")
    bench.run([list(range(40))], SamplingParams(temperature=0, max_tokens=1))
    assert order[:4] == ["hidden", "place", "__init__", "draft"]


def test_sequences_enter_in_one_copy(model, monkeypatch, rng):
    """From memory that a copy does not wait for: steps that are under way go on meanwhile."""
    copies, upload, bench = [], slot_state.upload, Bench(model, max_tokens_per_step=64)
    host, bench.runner.slots.device = bench.runner.slots.device, SimpleNamespace(type="cuda")  # a host's are written
    monkeypatch.setattr(slot_state, "upload", lambda array, _: copies.append(len(array)) or upload(array, host))
    prompts, params = random_prompts(rng, 3, longest=20), SamplingParams(temperature=0, max_tokens=2)
    run = bench.run(prompts, params)
    assert run.tokens == {i: greedy(model, prompt, 2) for i, prompt in enumerate(prompts)}
    entered = [plan.entered for plan in run.plans if plan.entered]
    assert len(copies) == len(entered) + sum(bool(plan.table) for plan in run.plans)


@pytest.mark.parametrize("fused", [False, True], ids=["whole", "in pieces"])
def test_drafts_are_read_with_the_tokens_where_a_grammar_needs_them(model, fused):
    """What the next step assumes, as the slots have it; of prompts without a grammar, nobody waits for them."""
    bench, found = Bench(model, depth=2, fused=fused, launch_ahead=False), {}
    launch = bench.runner.launch

    def noting(plan, specs):
        launched = launch(plan, specs)
        for item in plan.items:
            if item.kind == "prefill" and item.samples:
                drafts = launched.read().drafts.get(item.seq_id)
                found[item.seq_id] = drafts, bench.runner.slots.drafts_Y[item.slot].tolist()
        return launched

    bench.runner.launch = noting
    plain = SamplingParams(temperature=0, max_tokens=3)
    bench.run([[5, 6, 7]], plain.but(structured_outputs=StructuredOutputsParams(choice=["a"])))
    bench.run([[8, 9]], plain)
    assert found[0][0] == found[0][1] != [0, 0]
    assert found[1][0] is None
