"""Edited logits are the oracle's, token by token; rows that cannot be sampled say so."""

import random

import numpy as np
import pytest
import torch

from glm5.engine.sampling import Placement, Sampler, SamplingParams
from glm5.engine.sampling.edits import edited
from tests.unit.engine.sampling import oracle
from tests.unit.engine.sampling.oracle import rows_of

VOCAB, DEPTH = 67, 4
TOLERANCE = 1e-4  # in float32 a logit of 200 is rounded by up to 8e-6, in each of four steps; seen 2e-5


def random_placement(rng: random.Random, slot: int) -> tuple[Placement, list[int]]:
    """A sequence with some of everything, over few tokens so that they repeat, and drafts to follow it."""

    def some(count: int) -> list[int]:
        return [rng.randrange(12) for _ in range(count)]

    written, drafts = some(rng.randrange(40)), some(DEPTH)
    everything = written + drafts
    words = [tuple(some(rng.randrange(1, 5))) for _ in range(rng.randrange(5))]
    words += [
        (*everything[max(0, end - length) : end], rng.randrange(VOCAB))
        for end, length in ((rng.randrange(len(everything) + 1), rng.randrange(31)) for _ in range(rng.randrange(6)))
    ]
    kinds = {
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-150, 150) for _ in range(rng.randrange(9))},
        "allowed_token_ids": rng.sample(range(VOCAB), rng.randrange(1, VOCAB)),
        "min_tokens": rng.randrange(60),
    }
    chosen = {name: value for name, value in kinds.items() if rng.random() < 0.4}
    params = SamplingParams(max_tokens=None, **chosen)
    stop_ids = tuple(some(rng.randrange(4)))
    bad_words = tuple(words) if rng.random() < 0.5 else ()
    return Placement(
        slot, params, rng.randrange(2**64), some(rng.randrange(1, 9)), written, stop_ids, bad_words
    ), drafts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_edits_are_those_of_the_oracle(dtype, rng):
    num_slots, gen = 16, torch.Generator().manual_seed(rng.randrange(2**31))
    sampler = Sampler(num_slots, VOCAB, max_drafts=DEPTH)
    for _ in range(12):  # the same slots again and again
        placements, drafts = zip(*(random_placement(rng, slot) for slot in range(num_slots)), strict=True)
        sampler.place(list(placements))
        which = [(rng.randrange(num_slots), rng.randrange(DEPTH + 1)) for _ in range(40)]
        positions = [len(placements[s].prompt_ids) + len(placements[s].output_ids) + j for s, j in which]
        logits = (torch.randn(len(which), VOCAB, generator=gen) * 3).to(dtype)
        before = logits.clone()
        drafts_Y = torch.tensor([*drafts, [-1] * DEPTH])
        rows = rows_of([slot for slot, _ in which], positions, [offset for _, offset in which])
        got = edited(logits, rows, drafts_Y, sampler.tables, sampler.tables.features_of(rows.slots))
        assert torch.equal(logits, before)
        for row, (slot, offset) in enumerate(which):
            want = oracle.edited(logits[row].float().numpy(), placements[slot], drafts[slot][:offset])
            np.testing.assert_allclose(got[row].numpy(), want, rtol=0, atol=TOLERANCE)


def test_control_a_penalty_that_is_slightly_off_is_noticed():
    placement = Placement(0, SamplingParams(frequency_penalty=1.0), 0, [1], (2,))
    other = Placement(0, SamplingParams(frequency_penalty=1.001), 0, [1], (2,))
    sampler = Sampler(1, VOCAB)
    sampler.place([placement])
    rows = rows_of([0], [2])
    features = sampler.tables.features_of(rows.slots)
    got = edited(torch.zeros(1, VOCAB), rows, None, sampler.tables, features)[0].numpy()
    assert np.abs(got - oracle.edited(np.zeros(VOCAB), other)).max() > 5 * TOLERANCE


def test_min_tokens_end_at_their_position():
    params = SamplingParams(min_tokens=3, temperature=0)
    sampler = Sampler(1, 8)
    sampler.place([Placement(0, params, 0, [1, 2], stop_ids=(5,))])
    logits = torch.zeros(4, 8)
    logits[:, 5] = 1
    assert sampler.sample(logits, rows_of([0] * 4, [2, 3, 4, 5])).token_T.tolist() == [0, 0, 0, 5]


def test_a_bad_word_does_not_begin_in_the_prompt():
    params = SamplingParams(temperature=0)
    sampler = Sampler(2, 8)
    logits = torch.zeros(2, 8)
    logits[:, 5] = 1
    words = ((4, 5), (3, 4, 5))
    sampler.place([Placement(0, params, 0, [3, 4], (), (), words), Placement(1, params, 0, [3], (4,), (), words)])
    assert sampler.sample(logits, rows_of([0, 1], [2, 2])).token_T.tolist() == [5, 0]


def test_greedy_takes_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]]).repeat(2, 1)
    sampler = Sampler(2, 4)
    sampler.place([Placement(0, SamplingParams(temperature=0), 0, [1]), Placement(1, SamplingParams(top_k=1), 9, [1])])
    assert sampler.sample(logits, rows_of([0, 1], [1, 1])).token_T.tolist() == [1, 1]


@pytest.mark.parametrize(("case", "kept"), [({"top_k": 2}, {0, 1}), ({"top_p": 0.5}, {0, 1, 2}), ({}, set(range(6)))])
def test_equals_rank_by_smaller_id(case, kept):
    sampler = Sampler(1, 6)
    sampler.place([Placement(0, SamplingParams(**case), 5, [1])])
    sampled = sampler.sample(torch.zeros(300, 6), rows_of([0] * 300, range(300)))
    assert set(sampled.token_T.tolist()) == kept


@pytest.mark.parametrize("case", [{"temperature": 1e-5}, {"temperature": 1e-4, "top_p": 1e-9}, {"min_p": 1.0}])
def test_extreme_values_still_give_the_best_token(case):
    logits = torch.tensor([[-1e4, 5.0, 4.0, 1e-3]]).repeat(20, 1)
    sampler = Sampler(1, 4)
    sampler.place([Placement(0, SamplingParams(**case), 3, [1])])
    assert sampler.sample(logits, rows_of([0] * 20, range(20))).token_T.tolist() == [1] * 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_possible_token_say_so(temperature):
    logits = torch.zeros(4, 8)
    logits[1] = torch.nan
    logits[2] = -torch.inf
    sampler = Sampler(2, 8)
    shaped = SamplingParams(temperature=temperature, top_p=0.9, logprobs=2)
    cornered = SamplingParams(temperature=temperature, allowed_token_ids=[3])
    sampler.place([Placement(0, shaped, 3, [1]), Placement(1, cornered, 3, [1], bad_words=((3,),))])
    sampled = sampler.sample(logits, rows_of([0, 0, 0, 1], [1] * 4))
    assert sampled.no_valid_token_T.tolist() == [False, True, True, True]
    assert ((sampled.token_T >= 0) & (sampled.token_T < 8)).all()


def test_padding_rows_are_harmless():
    """Rows of the last slot, beside one that uses everything."""
    sampler = Sampler(1, 40, max_drafts=1)
    params = SamplingParams(presence_penalty=1, logit_bias={1: 2}, min_tokens=1, top_p=0.5, logprobs=1, min_p=0.1)
    sampler.place([Placement(0, params, 1, [1], stop_ids=(3,), bad_words=((1, 2),))])
    sampled = sampler.sample(torch.zeros(3, 40), rows_of([0, 1, 1], [1, 0, 0], [0, 0, 1]), torch.full((2, 1), -1))
    assert not sampled.no_valid_token_T.any()
    assert sampled.token_T[1:].tolist() == [0, 0]
