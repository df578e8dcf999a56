"""The sampler draws from the distribution that a numpy oracle computes, and from nothing but its own row."""

import math

import numpy as np
import pytest
import torch

from glm5.engine.params import SamplingParams
from glm5.engine.sampler import Draw, logprobs_of, sample

VOCAB = 23
NUM_DRAWS = 20_000
# Chi-square's 1 - 1e-6 quantile, by Wilson and Hilferty: a right sampler with a fixed seed stays far below.
Z_QUANTILE = 4.75


def oracle(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of one row, in float64 and token by token: the definition in plain words."""
    z = logits.astype(np.float64) / params.temperature
    probs = np.exp(z - z.max())
    probs[probs < params.min_p * probs.max()] = 0.0
    order = sorted(range(len(z)), key=lambda w: (-probs[w], w))
    for w in order[params.top_k if params.top_k > 0 else len(z) :]:
        probs[w] = 0.0
    probs /= probs.sum()
    mass = 0.0
    for w in order:
        if mass >= params.top_p:
            probs[w] = 0.0
        mass += probs[w]
    return probs / probs.sum()


def chi_square_excess(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's statistic over its limit: above 1 the counts are not of `probs`. Rare tokens are pooled."""
    expected = probs * counts.sum()
    rare = expected < 10
    observed, expected = [
        np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (counts.astype(float), expected)
    ]
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = max(len(expected) - 1, 1)
    limit = degrees * (1 - 2 / (9 * degrees) + Z_QUANTILE * math.sqrt(2 / (9 * degrees))) ** 3
    return float(((observed - expected) ** 2 / expected).sum() / limit)


def draw_counts(logits: torch.Tensor, params: SamplingParams, seed: int) -> np.ndarray:
    """How often each token comes at NUM_DRAWS successive positions of one request."""
    rows = logits.expand(NUM_DRAWS, -1)
    return np.bincount(sample(rows, [Draw(params, seed, position) for position in range(NUM_DRAWS)]), minlength=VOCAB)


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.6},
    {"top_p": 0.95, "temperature": 1.7},
    {"min_p": 0.2},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_distribution(case, seed):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    params = SamplingParams(**case)
    probs, counts = oracle(logits.numpy(), params), draw_counts(logits, params, seed)
    assert counts[probs == 0].sum() == 0
    assert chi_square_excess(counts, probs) < 1


def test_control_a_wrong_temperature_is_noticed(seed):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    counts = draw_counts(logits, SamplingParams(temperature=1.1), seed)
    assert chi_square_excess(counts, oracle(logits.numpy(), SamplingParams())) > 1


def test_seeds_and_positions_are_independent_streams(seed):
    """All pairs of outcomes of neighbouring seeds, and of neighbouring positions, come equally often."""
    logits = torch.zeros(NUM_DRAWS, 4)
    draws = {s: sample(logits, [Draw(SamplingParams(), s, p) for p in range(NUM_DRAWS)]) for s in (seed, seed + 1)}
    first, second = np.array(draws[seed]), np.array(draws[seed + 1])
    for joint in (first * 4 + second, first[:-1] * 4 + first[1:]):
        assert chi_square_excess(np.bincount(joint, minlength=16), np.full(16, 1 / 16)) < 1


def test_tokens_do_not_depend_on_the_batch(seed):
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, 301, generator=gen)
    kinds = [{"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}, {}, {"temperature": 3.0}]
    draws = [Draw(SamplingParams(**kinds[row % len(kinds)]), seed + row, row) for row in range(9)]
    together = sample(logits, draws)
    assert together == [sample(logits[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]
    assert together[::-1] == sample(logits.flip(0), draws[::-1])


def test_greedy_takes_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    assert sample(logits, [Draw(SamplingParams(temperature=0), 0, 0)]) == [1]


def test_top_k_among_equals_keeps_the_smaller_ids():
    logits = torch.zeros(200, 6)
    tokens = sample(logits, [Draw(SamplingParams(top_k=2), 5, position) for position in range(200)])
    assert set(tokens) == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_forbidden_tokens_never_come(temperature):
    logits = torch.tensor([[9.0, 1.0, 0.0]]).repeat(50, 1)
    params = SamplingParams(temperature=temperature)
    tokens = sample(logits, [Draw(params, 1, position, forbidden=(0, 2)) for position in range(50)])
    assert tokens == [1] * 50
    assert logits[0, 0] == 9.0  # the caller's logits are left alone


@pytest.mark.parametrize("params", [{"temperature": 1e-5}, {"temperature": 1e-4, "top_p": 1e-9}, {"min_p": 1.0}])
def test_extreme_values_still_give_the_best_token(params):
    logits = torch.tensor([[-1e4, 5.0, 4.0, 1e-3]]).repeat(20, 1)
    assert sample(logits, [Draw(SamplingParams(**params), 3, p) for p in range(20)]) == [1] * 20


def test_logprobs_and_ranks():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    want = logits.double().log_softmax(-1)
    first, second = logprobs_of(logits, [2, 3], [2, 0])
    assert list(first) == [2, 1]
    assert [entry.rank for entry in first.values()] == [2, 1]
    assert first[2].logprob == pytest.approx(want[0, 2].item())
    assert first[1].logprob == pytest.approx(want[0, 1].item())
    assert list(second) == [3]
    assert second[3].rank == 1
