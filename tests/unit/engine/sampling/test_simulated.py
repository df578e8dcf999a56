"""Drafts that stand as often as asked: what is gained on average, and who may ask for it."""

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.config.engine import EngineConfig
from glm5.engine.frontend.request_builder import Options
from glm5.engine.llm import LLM
from glm5.engine.sampling.drafts import accept
from glm5.engine.sampling.edits import Rows
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.sampling.simulated import probability_of, simulated
from tests.support.models import random_model

DEPTH, MEAN = 3, 2.99
STEPS = 1000
# Standard deviation of a step's gain is below 1.2, so of the mean of 1,000 below 0.04: five of them.
BUDGET = 0.2


def test_probability_gives_the_mean():
    p = probability_of(MEAN, DEPTH)
    assert sum(p**k for k in range(DEPTH + 1)) == pytest.approx(MEAN)
    assert probability_of(1, DEPTH) == pytest.approx(0)
    assert probability_of(4, DEPTH) == pytest.approx(1)


@pytest.mark.parametrize(("mean", "depth", "why"), [(2.0, 0, "nothing is drafted"), (4.2, 3, "1 to 4")])
def test_what_cannot_be_had_is_refused(mean, depth, why):
    with pytest.raises(ConfigError, match=why):
        probability_of(mean, depth)


@pytest.mark.parametrize("mean", [1.0, 2.0, MEAN, 4.0])
def test_steps_gain_the_mean(mean):
    """Slot 0 decodes on and on, each step from where the last one ended."""
    gen, probability = torch.Generator().manual_seed(0), probability_of(mean, DEPTH)
    slot_T, offset_T = torch.zeros(1 + DEPTH, dtype=torch.int64), torch.arange(1 + DEPTH)
    position = 0
    for _ in range(STEPS):
        drafts_Y = torch.randint(0, 3, (2, DEPTH), generator=gen)
        token_T = torch.randint(0, 3, (1 + DEPTH,), generator=gen)
        rows = Rows(slot_T.numpy(), slot_T, position + 1 + offset_T, offset_T)
        held_R = simulated(token_T, rows, drafts_Y, probability)
        assert held_R[-1] == token_T[-1]
        position += int(accept(held_R, slot_T, offset_T, drafts_Y).count_Y[0])
    assert position / STEPS == pytest.approx(mean, abs=BUDGET)


def test_rows_without_drafts_are_left_alone():
    slot_T, offset_T = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 0, 1])
    token_T, drafts_Y = torch.tensor([7, 8, 9, 10]), torch.zeros(4, DEPTH, dtype=torch.int64)
    rows = Rows(slot_T.numpy(), slot_T, torch.tensor([5, 5, 5, 6]), offset_T)
    assert simulated(token_T, rows, drafts_Y, 1.0).tolist() == [7, 8, 0, 10]


def test_only_with_dummy_weights():
    with pytest.raises(ValueError, match="only with load_format dummy"):
        EngineConfig(simulate_acceptance=2.0)


def test_an_engine_gains_it_and_says_so():
    options = {"num_speculative_tokens": DEPTH, "adaptive_speculation": False, "load_format": "dummy"}
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with LLM(random_model(1), simulate_acceptance=MEAN, max_num_seqs=4, **options) as llm:
        llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
        counts = llm.stats()["speculation"]
        assert "SIMULATED" in dict(llm.table)["drafts"]
        assert llm.client.info.simulated_acceptance == MEAN
        assert counts["simulated_acceptance"] == MEAN
    gained = 1 + sum(counts["accepted"]) / counts["drafted"][0]
    assert gained == pytest.approx(MEAN, abs=0.35)  # of 130 steps


def test_requests_that_want_no_drafts_cost_none():
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    received = []
    with LLM(random_model(1), num_speculative_tokens=DEPTH, max_num_seqs=4) as llm:
        options = Options(num_speculative_tokens=0)
        for prompt in ([5, 6, 7], [8, 9]):
            llm.client.submit(prompt, params, options, lambda _, stream: received.extend(stream.take()))
        while llm.client.num_unfinished:
            llm.client.pump(0.1)
        assert sum(llm.stats()["speculation"]["drafted"]) == 0
    assert sum(len(delta.token_ids) for delta in received) == 16


def test_without_drafts_it_is_refused():
    with pytest.raises(ConfigError, match="nothing is drafted"):
        LLM(random_model(1), simulate_acceptance=2.0, load_format="dummy", num_speculative_tokens=0)
