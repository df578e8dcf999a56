"""Whole answers follow the distribution that the model's own logits give, whatever edits it, with drafts and without.

Thousands of answers of three tokens to one prompt, each with a seed of its own; the oracle goes through every answer
that there could be. Without drafts a token is a row of a step; with drafts two tokens may stand in one.
"""

import itertools

import numpy as np
import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.sampling import Placement
from glm5.engine.sampling.params import SamplingParams
from glm5.model.glm5 import Glm5
from tests.support.models import random_model
from tests.support.real_core import RealCore, Request
from tests.unit.engine.sampling.oracle import chi_square_excess, distribution

VOCAB, NUM_TOKENS, NUM_ANSWERS = 7, 3, 600
PROMPT = [1, 2, 3, 3, 6]
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.9},
    "repetition": {"repetition_penalty": 3.0},
    "all": {
        "temperature": 1.4,
        "top_k": 5,
        "top_p": 0.95,
        "min_p": 0.02,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.2,
        "logit_bias": {4: 1.0},
    },
}


@pytest.fixture(scope="module")
def model() -> Glm5:
    return random_model(5, preset("tiny").replace(vocab_size=VOCAB))


@pytest.fixture(scope="module")
def logits(model) -> dict[tuple[int, ...], np.ndarray]:
    """Of what follows the prompt and every beginning of an answer."""
    heads = [head for length in range(NUM_TOKENS) for head in itertools.product(range(VOCAB), repeat=length)]
    with torch.inference_mode():
        return {head: model.logits([*PROMPT, *head])[-1].numpy() for head in heads}


@pytest.fixture(scope="module", params=[0, 3])
def answers(request, model) -> dict[str, np.ndarray]:
    """Token ids [NUM_ANSWERS, NUM_TOKENS] of each case; all cases share the batches of one engine."""
    requests = [
        Request(PROMPT, SamplingParams(max_tokens=None, **case), 10_000 * number + seed, NUM_TOKENS)
        for seed in range(NUM_ANSWERS)
        for number, case in enumerate(CASES.values())
    ]
    with RealCore(model, max_model_len=64, max_num_seqs=256, num_speculative_tokens=request.param) as engine:
        outcomes = engine.answer(requests)
        assert (engine.tokens_per_step > 1.1) == (request.param > 0)
    ids = np.array([outcome.token_ids for outcome in outcomes]).reshape(NUM_ANSWERS, len(CASES), NUM_TOKENS)
    return {name: ids[:, number] for number, name in enumerate(CASES)}


def probabilities(logits: dict[tuple[int, ...], np.ndarray], case: dict) -> np.ndarray:
    """Of every answer [VOCAB, VOCAB, VOCAB]."""
    whole = np.ones((VOCAB,) * NUM_TOKENS)
    for head, row in logits.items():
        placement = Placement(0, SamplingParams(max_tokens=None, **case), 0, PROMPT, head)
        whole[head] *= distribution(row, placement).reshape(-1, *[1] * (NUM_TOKENS - 1 - len(head)))
    return whole


def excess(ids: np.ndarray, probs: np.ndarray) -> float:
    """The worst of the tests on the first two tokens and on the last two. Above 1: not of this distribution."""
    counts = np.zeros_like(probs)
    np.add.at(counts, tuple(ids.T), 1)
    pairs = [(x.sum(axis=2).ravel(), x.sum(axis=0).ravel()) for x in (counts, probs)]
    return max(chi_square_excess(*both) for both in zip(*pairs, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_answers_follow_the_distribution(name, answers, logits):
    probs = probabilities(logits, CASES[name])
    assert abs(probs.sum() - 1) < 1e-9
    assert (probs[tuple(answers[name].T)] > 0).all()
    assert excess(answers[name], probs) < 1


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_control_other_parameters_are_noticed(name, answers, logits):
    assert excess(answers[name], probabilities(logits, CASES["plain"])) > 1
