"""The exact training pass: bit for bit the log-probabilities that a deterministic engine reported of what it drew.

Every comparison of log-probabilities here is for equality. The controls: the definition's own training pass, and faults
that a trainer could have (no temperature, tokens shifted by one, weights of one step before).
"""

import pytest
import torch

from glm5.common.errors import ConfigError, TrainingError
from glm5.engine import arithmetic
from glm5.engine.llm import LLM
from glm5.kernels import cpu_layer
from glm5.model.packed import PackedView
from glm5.rl.training.exact import ExactPass
from tests.support.exact import answers, default_logprobs, num_unlike
from tests.support.models import random_model

NATIVE = pytest.param("native", marks=pytest.mark.compiler)
CROWDED = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_speculative_tokens": 3}
ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False, "num_speculative_tokens": 0}


@pytest.fixture(params=[NATIVE, "torch"])
def layers(request, monkeypatch):
    """What engine and trainer run on."""
    if request.param == "torch":
        monkeypatch.setattr(arithmetic, "use_native", lambda _model, **_: False)
    return request.param


def engine(model, **settings) -> LLM:
    return LLM(model, max_model_len=256, deterministic=True, num_threads=1, **settings)


def trained(seed, cfg=None):
    return random_model(seed, cfg).requires_grad_()


@pytest.mark.parametrize("settings", [CROWDED, pytest.param(ALONE, marks=pytest.mark.slow)], ids=["crowded", "alone"])
def test_every_sampled_token_has_the_engines_bits(layers, settings, seed, rng):
    """Temperatures, cuts, two turns, chunks, prefix hits, drafts; before and after a step of the optimizer."""
    model = trained(seed)
    with engine(model, **settings) as llm:
        exact = ExactPass(model, threads=1)
        exact.check(llm.client.info.arithmetic)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for version in range(2):
            drawn = answers(llm, rng)
            assert set(drawn.versions) == {version}
            logprob_G = drawn.scored(exact)
            assert num_unlike(logprob_G, drawn.logprob_G) == 0
            shown = default_logprobs(model, drawn)
            (-logprob_G.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if settings is CROWDED:
            assert llm.stats()["prefix_cache"]["hit_tokens"]["device"] > 0
            assert sum(llm.stats()["speculation"]["drafted"]) > 0
    # The controls.
    assert num_unlike(shown, drawn.logprob_G) > len(shown) / 10
    assert num_unlike(drawn.scored(exact), drawn.logprob_G) > len(shown) / 2  # one step later
    assert torch.isfinite(logprob_G).all()
