"""Draws follow the distribution that the oracle computes, with and without drafts before them."""

import numpy as np
import pytest
import torch

from glm5.engine.sampling import Placement, Sampler, SamplingParams
from glm5.engine.sampling.noise import log_exponential
from tests.unit.engine.sampling.oracle import chi_square_excess, distribution, rows_of

VOCAB = 23
NUM_DRAWS = 20_000
PROMPT = (1, 2, 3, 3, 9)
OUTPUT = (4, 4, 5, 2)
DRAFTS = (4, 7, 8)
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
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 1.2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 0.5, "frequency_penalty": -0.7, "repetition_penalty": 1.3, "temperature": 0.7, "top_p": 0.9},
    {"logit_bias": {4: 1.5, 11: -100, 20: 2}},
    {"min_tokens": 10**6},
    {"bad_words": ["7", "8"]},
    {"allowed_token_ids": [0, 2, 3, 4, 17], "top_k": 4},
    {
        "logit_bias": {6: 2},
        "min_tokens": 10**6,
        "frequency_penalty": 0.4,
        "bad_words": ["2"],
        "top_k": 9,
        "min_p": 0.01,
    },
]


def placement_of(case: dict, seed: int) -> Placement:
    """A sequence in slot 3. One bad word goes on with the output, one with the drafts, one is a single token."""
    words = {"7": (4, 7, 8, 11), "8": (5, 2, 12), "2": (19,)}
    bad_words = tuple(words[word] for word in case.get("bad_words", ()))
    return Placement(3, SamplingParams(max_tokens=None, **case), seed, PROMPT, OUTPUT, (0, 6, 8), bad_words)


def draw_counts(logits: torch.Tensor, placement: Placement, num_drafts: int) -> np.ndarray:
    """How often each token comes in NUM_DRAWS rows: at other positions, which change the noise and nothing else."""
    sampler = Sampler(4, VOCAB, max_drafts=len(DRAFTS))
    sampler.place([placement])
    here = len(PROMPT) + len(OUTPUT) + num_drafts
    rows = rows_of([3] * NUM_DRAWS, range(here, here + NUM_DRAWS), [num_drafts] * NUM_DRAWS)
    drafts = torch.tensor([DRAFTS] * 5) if num_drafts else None
    sampled = sampler.sample(logits.expand(NUM_DRAWS, -1), rows, drafts)
    assert not sampled.no_valid_token_T.any()
    return np.bincount(sampled.token_T.numpy(), minlength=VOCAB)


def logits_of(seed: int) -> torch.Tensor:
    """Random ones; tokens that were written are likely, whatever the seed, so that penalties matter."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, generator=gen) * 2
    logits[[2, 4, 5, 7, 8]] = 2.5 + torch.rand(5, generator=gen)
    return logits


@pytest.mark.parametrize("num_drafts", [0, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_distribution(case, num_drafts, seed):
    logits, placement = logits_of(seed), placement_of(case, seed)
    probs = distribution(logits.numpy(), placement, DRAFTS[:num_drafts])
    counts = draw_counts(logits, placement, num_drafts)
    assert counts[probs == 0].sum() == 0
    assert chi_square_excess(counts, probs) < 1


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ({"temperature": 1.1}, {}),
        ({"top_p": 0.8}, {"top_p": 0.9}),
        ({"presence_penalty": 0.3}, {}),
        ({"frequency_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"repetition_penalty": 1.15}, {}),
        ({"logit_bias": {4: 0.2}}, {}),
    ],
    ids=str,
)
def test_control_other_parameters_are_noticed(case, wrong, seed):
    logits = logits_of(seed)
    counts = draw_counts(logits, placement_of(case, seed), 0)
    assert chi_square_excess(counts, distribution(logits.numpy(), placement_of(wrong, seed))) > 1


def test_control_a_draft_that_is_not_counted_is_noticed(seed):
    logits, placement = logits_of(seed), placement_of({"frequency_penalty": 1.0}, seed)
    counts = draw_counts(logits, placement, 2)
    assert chi_square_excess(counts, distribution(logits.numpy(), placement, DRAFTS[:2])) < 1
    assert chi_square_excess(counts, distribution(logits.numpy(), placement, DRAFTS[:1])) > 1


def noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> np.ndarray:
    """Uniform noise [R, W] behind the race."""
    return -np.expm1(-log_exponential(seeds, positions, vocab_size).double().exp().numpy())


@pytest.mark.parametrize("step", ["seed", "position", "token"])
def test_neighbouring_noise_is_independent(step, seed):
    """All pairs of outcomes of neighbours come equally often, and so do all values of each."""
    index, rest = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), seed)
    if step == "token":
        u = noise(torch.tensor([seed]), torch.tensor([7]), NUM_DRAWS)[0]
    else:
        u = noise(*((seed + index, rest) if step == "seed" else (rest, index)), 5)[:, 3]
    for bins in (4, 16):
        cell = (u * bins).astype(int)
        pairs = cell[:-1] * bins + cell[1:]
        assert chi_square_excess(np.bincount(pairs, minlength=bins**2), np.full(bins**2, bins**-2.0)) < 1
    fine = np.bincount((u * 1000).astype(int), minlength=1000)
    assert chi_square_excess(fine, np.full(1000, 1e-3)) < 1


def test_noise_has_no_repeats_and_reaches_far(seed):
    """A million values: hardly one twice, the smallest near 1e-6, none 0 or 1."""
    seeds, positions = torch.arange(seed, seed + 1000), torch.arange(1000)
    u = noise(seeds, positions, 1000).ravel()
    assert len(np.unique(u)) > len(u) * 0.97  # float32 near 1 has steps of 2**-24: chance repeats
    assert 0 < u.min() < 1e-5
    assert 1 - 1e-5 < u.max() < 1
