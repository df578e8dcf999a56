import math

import pytest

from glm5.engine.llm import LLM
from glm5.engine.sampling import grammar
from tests.support.models import random_model


@pytest.fixture(scope="session")
def tiny():
    """A random model whose greedy answers wander over the vocabulary, in float32."""
    return random_model(11)


@pytest.fixture(autouse=True)
def _no_grammar_is_slow(monkeypatch):
    """No outcome follows from how fast this machine is, but where a test asks for that."""
    monkeypatch.setattr(grammar, "MAX_SECONDS", math.inf)


@pytest.fixture
def make_llm(tiny):
    """An engine over the tiny model; small steps, so that batching and chunking happen in short tests."""

    def make(model=None, tokenizer=None, **options) -> LLM:
        defaults = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
        return LLM(tiny if model is None else model, tokenizer, **defaults | options)

    return make
